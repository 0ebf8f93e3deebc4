"""What a checkpoint must contain, the policy it was written under, and the refusal to mix policies."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pyarrow.fs
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID

from precision_policies import PrecisionPolicy
from rllib_llm.learner.module import WEIGHTS_FILE

__all__ = [
    "CheckpointError",
    "PrecisionChangeError",
    "absolute",
    "precision_metadata",
    "read_metadata",
    "refuse_other_policy",
    "seal",
    "verify_files",
]

METADATA_FILE = "rllib_checkpoint.json"  # RLlib's name for the metadata of an Algorithm
METADATA_KEY = "rllib_llm"
SIZES_FILE = "rllib_llm_file_sizes.json"
_LEARNER = pathlib.PurePosixPath(COMPONENT_LEARNER_GROUP) / COMPONENT_LEARNER
REQUIRED_FILES = (
    METADATA_FILE,
    "algorithm_state.pkl",
    str(_LEARNER / "state.pkl"),
    str(_LEARNER / COMPONENT_RL_MODULE / DEFAULT_MODULE_ID / WEIGHTS_FILE),
)


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, or what was restored from it is not what was saved."""


class PrecisionChangeError(CheckpointError):
    """A checkpoint of one precision policy was to be continued under another."""


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


def _open(path: str, filesystem: Any) -> tuple[Any, pathlib.PurePosixPath]:
    if filesystem is None:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(path)
    return filesystem, pathlib.PurePosixPath(path)


def read_metadata(path: str, filesystem: Any = None) -> dict[str, Any]:
    """The METADATA_KEY part of a checkpoint. Raises CheckpointError where there is none, or no mapping."""
    fs, root = _open(path, filesystem)
    file = (root / METADATA_FILE).as_posix()
    if fs.get_file_info(file).type == pyarrow.fs.FileType.NotFound:
        raise CheckpointError(f"{root} is not a checkpoint: {METADATA_FILE} is missing.")
    with fs.open_input_stream(file) as stream:
        text = stream.read()
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{root} is damaged: {METADATA_FILE} is no JSON ({error}).") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), dict):
        raise CheckpointError(
            f"{root} was not written by rllib_llm: {METADATA_FILE} has no {METADATA_KEY!r} entry."
        )
    return metadata[METADATA_KEY]


def seal(path: str, filesystem: Any = None) -> None:
    """Writes the sizes of all files of a checkpoint into SIZES_FILE; the last step of saving."""
    fs, root = _open(path, filesystem)
    found = fs.get_file_info(pyarrow.fs.FileSelector(root.as_posix(), recursive=True))
    files = {pathlib.PurePosixPath(info.path): info.size for info in found if info.is_file}
    sizes = {
        file.relative_to(root).as_posix(): size for file, size in files.items() if file.name != SIZES_FILE
    }
    with fs.open_output_stream((root / SIZES_FILE).as_posix()) as stream:
        stream.write(json.dumps(sizes, indent=1, sort_keys=True).encode())


def verify_files(path: str, filesystem: Any = None) -> None:
    """Raises CheckpointError naming every required file that is missing or empty, and every one of another size than
    when it was written.

    RLlib ignores the outcome of the remote learner's save; one that raised leaves a checkpoint without weights. A
    full disk, or a process killed while it copied, leaves files without their end.
    """
    fs, root = _open(path, filesystem)
    written = _sizes_written(fs, root)
    either = {name: (name, name.removesuffix(".pkl") + ".msgpack") for name in REQUIRED_FILES}
    names = sorted({*written, *(name for pair in either.values() for name in pair)})
    infos = fs.get_file_info([(root / name).as_posix() for name in names])
    found = {name: info.size for name, info in zip(names, infos, strict=True) if info.size}
    lost = [name for name, pair in either.items() if found.keys().isdisjoint(pair)]
    lost += [name for name, size in written.items() if size and name not in found and name not in either]
    problems = [f"{name} is missing or empty" for name in lost]
    problems += [
        f"{name} has {found[name]} bytes, written were {size}"
        for name, size in written.items()
        if name in found and found[name] != size
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {root} is incomplete: {', '.join(problems)}. The learner failed while saving (its own log has "
            "the reason), the disk was full, or the process was ended; do not restore from this directory."
        )


def _sizes_written(fs: Any, root: pathlib.PurePosixPath) -> dict[str, int]:
    """Content of SIZES_FILE; empty where there is none, as in checkpoints from before there was one."""
    file = (root / SIZES_FILE).as_posix()
    if fs.get_file_info(file).type == pyarrow.fs.FileType.NotFound:
        return {}
    with fs.open_input_stream(file) as stream:
        text = stream.read()
    try:
        sizes = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {root} is incomplete: {SIZES_FILE} is cut off.") from error
    if not isinstance(sizes, dict):
        raise CheckpointError(f"checkpoint {root} is damaged: {SIZES_FILE} holds no sizes of files.")
    return sizes


def refuse_other_policy(saved: dict[str, Any], policy: PrecisionPolicy, allow: bool, path: str) -> bool:
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
