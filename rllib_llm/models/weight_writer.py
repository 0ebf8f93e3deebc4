"""Writing the weight files of a model directory so that it holds a whole checkpoint at every moment.

Readers, transformers' and ours, take ``model.safetensors`` if it is there, else what the index names. So a new
checkpoint is written beside the old one under names that the old one does not use, and one rename or removal makes it
the one that is read; only then are the old files removed. Whoever is killed in between leaves the old or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from rllib_llm.models.paths import ModelPathError
from rllib_llm.models.safetensor_files import INDEX_FILE, SINGLE_FILE, weight_map_of

__all__ = ["exchange", "write_tensors"]

_SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_PART = ".part"


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> None:
    """Write CPU tensors as one file, or as shards of at most `max_shard_bytes` with an index, as
    transformers reads them.

    Weights that lie there already are replaced; a reader sees the old ones or the new ones, also after a crash.
    """
    old = _weight_files(directory)
    shards = _shards(tensors, max_shard_bytes)
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    names = [SINGLE_FILE] if len(shards) == 1 else _free_names(len(shards), old)
    for name, shard in zip(names, shards, strict=True):
        part = directory / (name + _PART)
        save_file(shard, part, metadata={"format": "pt"})
        _to_disk(part)
    if len(shards) > 1:
        _write_index(index.with_name(index.name + _PART), names, shards)
    for name in names:
        (directory / (name + _PART)).replace(directory / name)  # one file: from here on it is read
    if len(shards) > 1:
        index.with_name(index.name + _PART).replace(
            index
        )  # from here on it is read, unless a single file is there
        single.unlink(missing_ok=True)
        old.discard(SINGLE_FILE)
    else:
        index.unlink(missing_ok=True)
    _to_disk(directory)
    for name in old - set(names):
        (directory / name).unlink(missing_ok=True)
    for part in directory.glob(f"model*.safetensors*{_PART}"):  # of a write that was killed
        part.unlink(missing_ok=True)


def _weight_files(directory: Path) -> set[str]:
    """Names of the safetensors files of the checkpoint that lies in a directory, and of shards left over there."""
    found = {file.name for file in directory.glob("*.safetensors") if _SHARD.fullmatch(file.name)}
    if (directory / SINGLE_FILE).is_file():
        found.add(SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        with contextlib.suppress(ModelPathError):  # a damaged index names nothing; it is replaced
            found |= {n for n in weight_map_of(directory / INDEX_FILE).values() if Path(n).name == n}
    return found


def _shards(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += nbytes
    return shards


def _free_names(count: int, taken: set[str]) -> list[str]:
    """The usual names of shards, or numbered ones where a shard of the old checkpoint has such a name."""
    generation = 1
    while True:
        stem = "model" if generation == 1 else f"model-{generation}"
        names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if taken.isdisjoint(names):
            return names
        generation += 1


def _write_index(file: Path, names: list[str], shards: list[dict[str, torch.Tensor]]) -> None:
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    weight_map = {name: where for where, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _to_disk(file)


def _to_disk(path: Path) -> None:
    """Have a file's bytes, or a directory's entries, on the disk: renames may otherwise overtake what they name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems cannot sync a directory
        pass
    finally:
        os.close(handle)


def exchange(staged: Path, target: Path) -> None:
    """Have two directories of one file system change places in one step.

    Raises:
        OSError: this system, or this file system, cannot.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # Linux's, glibc 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if library.renameat2(here, os.fsencode(staged), here, os.fsencode(target), swap) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
