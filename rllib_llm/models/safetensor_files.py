"""Reading and writing the weight files of a Hugging Face model directory: safetensors, one file or sharded
by an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointError(ValueError):
    """A model directory whose weights cannot be used; lists every problem."""


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, without reading tensors.

    Raises:
        CheckpointError: no safetensors, a broken index, a shard that is missing or does not hold what the
            index says.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return dict.fromkeys(_names(single), single)
    if index.is_file():
        return _indexed_files(directory, index)
    pickled = [name for name in _PICKLES if (directory / name).is_file()]
    hint = (
        f"{pickled[0]} is a pickle, which can run code, and is not read: convert it with transformers' "
        f"save_pretrained()"
        if pickled
        else "the directory holds no weights"
    )
    raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}: {hint}")


def _indexed_files(directory: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards ({error})") from None
    problems: list[str] = []
    files: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        wanted = {name for name, where in weight_map.items() if where == shard}
        if path.parent != directory or not path.is_file():
            problems.append(f"shard {shard} of {len(wanted)} tensors is not in {directory}")
            continue
        absent = wanted - set(_names(path))
        problems += [f"{name} is not in {shard}, where the index puts it" for name in sorted(absent)]
        files |= dict.fromkeys(wanted - absent, path)
    if problems:
        raise CheckpointError(f"{index}:\n" + "\n".join(f"  - {p}" for p in problems))
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as reader:
            return list(reader.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}): copy it again") from None


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, from the files' headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(reader.get_slice(name).get_shape())
    return shapes


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors one after the other, file by file, so that one is in memory at a time."""
    wanted = set(names)
    for path in sorted({files[name] for name in wanted}):
        with safe_open(path, framework="pt") as reader:
            for name in sorted(n for n in wanted if files[n] == path):
                yield name, reader.get_tensor(name)


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> None:
    """Write CPU tensors as one file, or as shards of at most `max_shard_bytes` with an index, as
    transformers reads them.

    Files are written under temporary names and renamed when all are complete: a reader never sees half a
    checkpoint.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += nbytes
    count = len(shards)
    names = (
        [SINGLE_FILE]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    for file_name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / f"{file_name}.part", metadata={"format": "pt"})
    for stale in (directory / SINGLE_FILE, directory / INDEX_FILE):
        stale.unlink(missing_ok=True)
    for file_name in names:
        (directory / f"{file_name}.part").rename(directory / file_name)
    if count > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
