"""The manifest of a registered model: every file with its sha256, every tensor with the hash of a weight receipt."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.hashes import file_sha256
from rllib_llm.weights.format import hash_tensors

__all__ = ["MANIFEST_FILE", "Manifest", "ManifestError", "probe_hash"]

MANIFEST_FILE = "manifest.json"
_FORMAT = "rllib_llm.registered_model/1"


class ManifestError(RegistryError):
    """A directory without a manifest, or with one that cannot be read."""


@functools.cache
def probe_hash() -> str:
    """Hash of a fixed tensor: tells whether the tensor hashes of a manifest were made by the function of today."""
    return hash_tensors({"probe": torch.arange(1000, dtype=torch.float32)})["probe"]


@dataclass(frozen=True)
class Manifest:
    """What a registered model consists of.

    Attributes:
        policy_name, policy_fingerprint, plan_hash: the policy, and its plan on this model.
        masters: folder with the weights rounded to the compute dtype, in Hugging Face format.
        fp8: folder with the bytes of the rollout in the block-FP8 format; None where the rollout holds no FP8.
        files: path relative to the directory -> {"sha256", "bytes"}, all files but the manifest.
        tensors: name -> hash of everything that a rollout engine holds, as its weight receipt states them.
        tensor_hash_probe: `probe_hash` at the time of writing.
        lineage: where the weights come from, plain data.
        adapter: folder with the adapters that the masters were merged with, as a PEFT directory; None without.
    """

    policy_name: str
    policy_fingerprint: str
    plan_hash: str
    masters: str
    fp8: str | None
    files: dict[str, dict[str, Any]]
    tensors: dict[str, str]
    tensor_hash_probe: str
    lineage: dict[str, Any]
    adapter: str | None = None

    def write(self, root: Path) -> str:
        """Write MANIFEST_FILE into `root`; returns its sha256, which is kept outside (a tag of the model version)."""
        data = {"format": _FORMAT, **dataclasses.asdict(self)}
        file = root / MANIFEST_FILE
        file.write_text(
            json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return file_sha256(file)

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """The manifest in `root`. Raises ManifestError where there is none, or another format."""
        file = root / MANIFEST_FILE
        if not file.is_file():
            raise ManifestError(
                f"{root} has no {MANIFEST_FILE}: it was not made by rllib-llm models register"
            )
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            form = data.pop("format")
            if form != _FORMAT:
                raise ManifestError(f"{file}: format {form!r}, this version of rllib_llm reads {_FORMAT!r}")
            manifest = cls(**data)
        except ManifestError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{file} is not a manifest of ours: {error!r}") from error
        if problems := list(_problems(manifest)):
            raise ManifestError(f"{file} is not a manifest of ours: {'; '.join(problems)}")
        return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """Values of another type than `Manifest` says, and folders that are not in the directory."""
    texts = ("policy_name", "policy_fingerprint", "plan_hash", "masters", "tensor_hash_probe")
    for name in texts:
        if not isinstance(getattr(manifest, name), str):
            yield f"{name} must be a text"
    for name in ("masters", "fp8", "adapter"):
        folder = getattr(manifest, name)
        if isinstance(folder, str) and (Path(folder).name != folder or folder in ("", "..")):
            yield f"{name} = {folder!r} must be the name of a folder beside it"
        elif name != "masters" and not isinstance(folder, str | None):
            yield f"{name} must be a text or null"
    if not isinstance(manifest.files, dict) or not all(map(_is_file_entry, manifest.files.values())):
        yield "files must map paths to sha256 (text) and bytes (whole number)"
    if not isinstance(manifest.tensors, dict) or not all(
        isinstance(v, str) for v in manifest.tensors.values()
    ):
        yield "tensors must map names to hashes"
    if not isinstance(manifest.lineage, dict):
        yield "lineage must be an object"


def _is_file_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("bytes"), int)
    )


def hash_files(root: Path) -> dict[str, dict[str, Any]]:
    """Relative path -> {"sha256", "bytes"} of every file below `root` but the manifest."""
    return {
        path.relative_to(root).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for path in sorted(root.rglob("*"))
        if path.is_file() and path != root / MANIFEST_FILE
    }
