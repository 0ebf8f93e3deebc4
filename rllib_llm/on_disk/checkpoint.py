"""What files a checkpoint consists of, their hashes, the policy it was written under, and the refusal to mix policies.

MANIFEST_FILE is written last and lists size and sha256 of every other file. It tells a whole checkpoint from one that
was cut off, changed, or added to. It is no signature: whoever can write all files of a checkpoint can also write it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import pyarrow.fs
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID

from precision_policies import PrecisionPolicy
from rllib_llm.on_disk.errors import CheckpointError, PrecisionChangeError

__all__ = [
    "ALGORITHM_STATE",
    "CLASS_FILE",
    "LEARNER_FOLDER",
    "LEARNER_STATE",
    "MANIFEST_FILE",
    "MARKER_FILE",
    "METADATA_FILE",
    "MODULE_FILE",
    "MODULE_FOLDER",
    "OPTIMIZER_STATE",
    "WEIGHTS_FILE",
    "CheckpointError",
    "PrecisionChangeError",
    "absolute",
    "opened",
    "precision_metadata",
    "read_metadata",
    "refuse_precision_change",
    "refuse_unknown_files",
    "verify_files",
    "write_manifest",
]

METADATA_FILE = "rllib_checkpoint.json"  # RLlib's name for the metadata of an Algorithm
METADATA_KEY = "rllib_llm"
CLASS_FILE = "class_and_ctor_args.pkl"
"""RLlib's pickle of class and config. Only `Algorithm.from_checkpoint` of RLlib reads it."""
MARKER_FILE = "algorithm_state.pkl"
"""Empty. RLlib's `from_checkpoint` takes a folder for a checkpoint by this name, and does not open it."""
MANIFEST_FILE = "rllib_llm_manifest.json"
_MANIFEST_FORMAT = "rllib_llm.checkpoint/1"
WEIGHTS_FILE = "model.safetensors"
MODULE_FILE = "module.json"
"""What a module was built from."""
ALGORITHM_STATE = "algorithm_state"
"""Name of the state (`rllib_llm.on_disk.state_file`) of driver and environments: counters, metrics, guard."""
LEARNER_STATE = "state"
OPTIMIZER_STATE = "optimizer"
LEARNER_FOLDER = pathlib.PurePosixPath(COMPONENT_LEARNER_GROUP) / COMPONENT_LEARNER
MODULE_FOLDER = pathlib.PurePosixPath(COMPONENT_RL_MODULE) / DEFAULT_MODULE_ID
"""Of the weights, within LEARNER_FOLDER."""
REQUIRED_FILES = (
    METADATA_FILE,
    f"{ALGORITHM_STATE}.json",
    str(LEARNER_FOLDER / f"{LEARNER_STATE}.json"),
    str(LEARNER_FOLDER / f"{OPTIMIZER_STATE}.json"),
    str(LEARNER_FOLDER / MODULE_FOLDER / WEIGHTS_FILE),
)
KNOWN_FILES = {
    *REQUIRED_FILES,
    CLASS_FILE,
    MARKER_FILE,
    f"{ALGORITHM_STATE}.safetensors",
    str(LEARNER_FOLDER / f"{LEARNER_STATE}.safetensors"),
    str(LEARNER_FOLDER / f"{OPTIMIZER_STATE}.safetensors"),
    str(LEARNER_FOLDER / MODULE_FOLDER / MODULE_FILE),
}
"""All that a manifest may list. Ray unpickles files by their names, whoever wrote them."""
_NOT_LISTED = (MANIFEST_FILE, ".metadata.json")  # the latter is Ray's, JSON, and written after us


def absolute(path: str | pathlib.Path | None) -> str | None:
    """RLlib hands paths to pyarrow, which takes "runs/1" for an URI without a scheme."""
    if path is None or "://" in str(path):
        return None if path is None else str(path)
    return os.path.abspath(os.path.expanduser(str(path)))


def precision_metadata(policy: PrecisionPolicy, **further: Any) -> dict[str, Any]:
    """What METADATA_FILE records under METADATA_KEY."""
    return {
        METADATA_KEY: {
            "policy": policy.to_dict(),
            "policy_name": policy.name,
            "fingerprint": policy.fingerprint,
            **further,
        }
    }


def opened(path: str, filesystem: Any = None) -> tuple[pyarrow.fs.FileSystem, pathlib.PurePosixPath]:
    """(filesystem, path within it); the filesystem is found by the path where none is given."""
    if filesystem is None:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(path)
    return filesystem, pathlib.PurePosixPath(path)


def read_metadata(path: str, filesystem: Any = None) -> dict[str, Any]:
    """The METADATA_KEY part of a checkpoint. Raises CheckpointError where there is none, or no mapping."""
    fs, root = opened(path, filesystem)
    file = (root / METADATA_FILE).as_posix()
    if fs.get_file_info(file).type == pyarrow.fs.FileType.NotFound:
        raise CheckpointError(f"{root} is not a checkpoint: {METADATA_FILE} is missing.")
    with fs.open_input_stream(file) as stream:
        text = stream.read()
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{root} is damaged: {METADATA_FILE} is no JSON ({error}).") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), dict):
        raise CheckpointError(
            f"{root} was not written by rllib_llm: {METADATA_FILE} has no {METADATA_KEY!r} entry."
        )
    return metadata[METADATA_KEY]


def write_manifest(path: str, filesystem: Any = None) -> None:
    """Writes size and sha256 of the files of a checkpoint into MANIFEST_FILE; the last step of saving."""
    fs, root = opened(path, filesystem)
    files = {
        name: {"bytes": size, "sha256": _sha256(fs, root / name)}
        for name, size in sorted(_files_in(fs, root).items())
        if name in KNOWN_FILES
    }
    document = {"format": _MANIFEST_FORMAT, "files": files}
    with fs.open_output_stream((root / MANIFEST_FILE).as_posix()) as stream:
        stream.write(json.dumps(document, indent=1).encode())


def verify_files(path: str, filesystem: Any = None, *, contents: bool = True) -> None:
    """Raises CheckpointError naming every file that is not what was written; nothing is opened but to hash it.

    A learner that died leaves a checkpoint without weights; a full disk, or a process killed while it copied, leaves
    files without their end; others may have changed, or added, what they like.

    contents: False looks at names and sizes of what was written only. That takes no time, and tells a checkpoint that
        was written to its end from one that was not.
    """
    fs, root = opened(path, filesystem)
    listed, found = _listed(fs, root), _files_in(fs, root)
    problems = [f"{name} is missing" for name in REQUIRED_FILES if name not in listed]
    for name, (size, digest) in listed.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name] != size:
            problems.append(f"{name} has {found[name]} bytes, written were {size}")
        elif contents and _sha256(fs, root / name) != digest:
            problems.append(f"{name} has other bytes than were written (sha256)")
    if problems:
        raise CheckpointError(
            f"checkpoint {root} is incomplete or changed: {', '.join(problems)}. The learner failed while saving (its "
            "own log has the reason), the disk was full, the process was ended, or somebody changed it; do not "
            "restore from this directory."
        )
    if contents:
        refuse_unknown_files(path, filesystem)


def refuse_unknown_files(path: str, filesystem: Any = None) -> None:
    """Raises CheckpointError naming the files that are not in the manifest, and a manifest that is not there."""
    fs, root = opened(path, filesystem)
    unknown = sorted(_files_in(fs, root).keys() - _listed(fs, root).keys() - {*_NOT_LISTED})
    if unknown:
        raise CheckpointError(
            f"checkpoint {root} holds files that were not written with it: {', '.join(unknown)}. Look who put them "
            "there, and remove them to restore from this directory."
        )


def _files_in(fs: pyarrow.fs.FileSystem, root: pathlib.PurePosixPath) -> dict[str, int]:
    """name relative to `root` -> bytes, of all that is no directory."""
    selector = pyarrow.fs.FileSelector(root.as_posix(), recursive=True, allow_not_found=True)
    infos = {pathlib.PurePosixPath(info.path): info for info in fs.get_file_info(selector)}
    return {
        path.relative_to(root).as_posix(): int(info.size or 0)
        for path, info in infos.items()
        if info.type != pyarrow.fs.FileType.Directory
    }


def _sha256(fs: pyarrow.fs.FileSystem, path: pathlib.PurePosixPath) -> str:
    digest = hashlib.sha256()
    with fs.open_input_stream(path.as_posix()) as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _listed(fs: pyarrow.fs.FileSystem, root: pathlib.PurePosixPath) -> dict[str, tuple[int, str]]:
    """name -> (bytes, sha256) of MANIFEST_FILE. Raises CheckpointError where it is missing or damaged."""
    file = (root / MANIFEST_FILE).as_posix()
    if fs.get_file_info(file).type == pyarrow.fs.FileType.NotFound:
        raise CheckpointError(
            f"{root} is no complete checkpoint: {MANIFEST_FILE}, which is written last, is missing. Go on from an "
            "earlier one."
        )
    with fs.open_input_stream(file) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
        if document["format"] != _MANIFEST_FORMAT:
            raise ValueError(f"its format is {document['format']!r}, known is {_MANIFEST_FORMAT!r}")
        files = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in document["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {root} is damaged: {MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if unknown := sorted(files.keys() - KNOWN_FILES):
        raise CheckpointError(
            f"checkpoint {root}: {MANIFEST_FILE} lists {', '.join(unknown)}, which no checkpoint of this version has."
        )
    return files


def refuse_precision_change(saved: dict[str, Any], policy: PrecisionPolicy, allow: bool, path: str) -> bool:
    """True if the checkpoint was written under this policy, False under another one that is allowed.

    Raises PrecisionChangeError with every difference and its consequence otherwise.
    """
    if saved["fingerprint"] == policy.fingerprint:
        return True
    if allow:
        return False
    differences = PrecisionPolicy.from_dict(saved["policy"]).diff(policy)
    lines = [f"{d.key}: checkpoint {d.ours!r}, now {d.theirs!r}: {d.consequence}" for d in differences]
    raise PrecisionChangeError(
        f"checkpoint {path} was written under policy {saved['policy_name']!r} ({saved['fingerprint'][:12]}), this "
        f"run uses {policy.name!r} ({policy.fingerprint[:12]}):\n  "
        + "\n  ".join(lines)
        + "\nUse the checkpoint's policy, or set "
        "precision(..., allow_precision_change=True) to continue under the new one deliberately."
    )
