"""Reading and checking the weight files of a Hugging Face model directory: safetensors, one file or sharded by an
index. Writing: `rllib_llm.models.weight_writer`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.models.paths import ModelPathError, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""dtypes of a checkpoint's tensors, as safetensors names them. All others are codes, which mean nothing without their
scales: give the unquantised checkpoint."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class ModelFilesError(RllibLLMError, InputError, ValueError):
    """A model directory whose weights cannot be used; lists every problem."""


class IndexFileError(ModelFilesError, ModelPathError):
    """The index of a sharded checkpoint is damaged."""


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of a tensor: dtype as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, without reading tensors.

    With an index, the tensors that it names: what else lies in a shard is none of the model's.

    Raises:
        ModelFilesError: no safetensors, a broken index, a shard that is missing or does not hold what the
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
    raise ModelFilesError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}: {hint}")


def weight_map_of(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as an index says.

    Raises:
        IndexFileError: it is damaged.
    """
    try:
        weight_map = read_json(index).get("weight_map")
    except ModelPathError as error:
        raise IndexFileError(f"{index}: not an index of safetensors shards ({error})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise IndexFileError(
            f"{index}: not an index of safetensors shards (weight_map must say a file name for each tensor, it is "
            f"{str(weight_map)[:80]!r}): copy it again"
        )
    return weight_map


def _indexed_files(directory: Path, index: Path) -> dict[str, Path]:
    weight_map = weight_map_of(index)
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
        raise ModelFilesError(f"{index}:\n" + "\n".join(f"  - {p}" for p in problems))
    return files


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as reader:
            return list(reader.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path}: not a readable safetensors file ({error}): copy it again") from None


def stored_tensors(files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Name -> dtype and shape, from the header of the file that holds it."""
    found: dict[str, StoredTensor] = {}
    for path, names in _by_file(files, files):
        with safe_open(path, framework="pt") as reader:
            for name in names:
                view = reader.get_slice(name)
                found[name] = StoredTensor(str(view.get_dtype()), tuple(view.get_shape()))
    return found


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors one after the other, file by file, so that one is in memory at a time."""
    for path, held in _by_file(files, names):
        with safe_open(path, framework="pt") as reader:
            for name in held:
                yield name, reader.get_tensor(name)


def _by_file(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[Path, list[str]]]:
    wanted = set(names)
    for path in sorted({files[name] for name in wanted}):
        yield path, sorted(n for n in wanted if files[n] == path)


def value_problems(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[str]:
    """NaN or infinity in a tensor, or a number that becomes one when it is rounded to one of `dtypes`."""
    if tensor.numel() == 0:
        return []
    ends = torch.stack(torch.aminmax(tensor.detach()))
    if not bool(torch.isfinite(ends).all()):
        count = int((~torch.isfinite(tensor)).sum())
        return [f"{name}: {count} of {tensor.numel()} values are NaN or infinite"]
    for dtype in dtypes:
        if not bool(torch.isfinite(ends.to(dtype)).all()):
            largest = float(ends.abs().max())
            kind = str(dtype).removeprefix("torch.")
            return [
                f"{name}: its largest value {largest:.6g} overflows {kind}, whose largest is "
                f"{torch.finfo(dtype).max:.6g}"
            ]
    return []
