"""A tree of plain values and tensors in two files: ``NAME.json``, and ``NAME.safetensors`` where there are tensors.

The JSON is the tree. What JSON has no word for stands in it as a mapping with one key that starts with "$":

    {"$tensor": key}, {"$array": key}        a torch tensor, a numpy array; its bytes are in the safetensors file
    {"$scalar": [dtype, value]}              a numpy number
    {"$float": "nan" | "inf" | "-inf"}
    {"$tuple": [...]}, {"$deque": [[...], maxlen]}, {"$map": [[key, value], ...]} (keys that are no plain texts)

Reading makes these types and no others, so nothing that a file says is executed.
"""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow.fs
import safetensors
import safetensors.torch
import torch

from rllib_llm.errors import RllibLLMError

__all__ = ["StateFileError", "read_state", "read_tensor_file", "write_state", "write_tensor_file"]

_FORMAT = "rllib_llm.state/1"
_NUMBERS = "biuf"
"""Kinds of numpy dtypes: bool, signed, unsigned, floating."""


class StateFileError(RllibLLMError, ValueError):
    """A state that cannot be written as plain values and tensors, or a file that holds none."""


def write_state(fs: pyarrow.fs.FileSystem, folder: PurePosixPath, name: str, state: Any) -> None:
    """Write `state` into `folder`.

    state: None, bool, int, float, str, list, tuple, dict, deque, numpy number or array, torch tensor, nested.

    Raises:
        StateFileError: lists the place and type of each value that is none of these; nothing is written.
    """
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    tree = _encoded(state, (), tensors, problems)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise StateFileError(
            f"{folder / name}: not only plain values, numpy arrays and torch tensors (JSON and safetensors hold no "
            f"other objects); give them as such in get_state:\n{lines}"
        )
    if tensors:
        write_tensor_file(fs, folder / f"{name}.safetensors", tensors)
    document = {"format": _FORMAT, "tensors": len(tensors), "state": tree}
    with fs.open_output_stream((folder / f"{name}.json").as_posix()) as file:
        file.write(json.dumps(document, allow_nan=False).encode())


def read_state(fs: pyarrow.fs.FileSystem, folder: PurePosixPath, name: str) -> Any:
    """Inverse of `write_state`. Raises StateFileError for what `write_state` does not write."""
    path = folder / f"{name}.json"
    try:
        with fs.open_input_stream(path.as_posix()) as file:
            document = json.loads(file.read())
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise StateFileError(f"{path}: not a state of format {_FORMAT}")
        named = document["tensors"]
        tensors = read_tensor_file(fs, folder / f"{name}.safetensors") if named else {}
        return _decoded(document["state"], tensors)
    except StateFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateFileError(f"{path}: not a readable state ({type(error).__name__}: {error})") from error


def write_tensor_file(
    fs: pyarrow.fs.FileSystem, path: PurePosixPath, tensors: dict[str, torch.Tensor]
) -> None:
    """One safetensors file; tensors are on the CPU and share no memory."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if isinstance(fs, pyarrow.fs.LocalFileSystem):  # without a second copy of all bytes in memory
        safetensors.torch.save_file(tensors, path.as_posix())
        return
    with fs.open_output_stream(path.as_posix()) as file:
        file.write(safetensors.torch.save(tensors))


def read_tensor_file(fs: pyarrow.fs.FileSystem, path: PurePosixPath) -> dict[str, torch.Tensor]:
    """Inverse of `write_tensor_file`. Raises StateFileError for a file that is missing or is no safetensors file."""
    try:
        if isinstance(fs, pyarrow.fs.LocalFileSystem):
            return safetensors.torch.load_file(path.as_posix())
        with fs.open_input_stream(path.as_posix()) as file:
            return safetensors.torch.load(file.read())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StateFileError(
            f"{path}: not a readable safetensors file ({type(error).__name__}: {error})"
        ) from error


def _encoded(
    value: Any, place: tuple[str, ...], tensors: dict[str, torch.Tensor], problems: list[str]
) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return _encoded(item, (*place, str(key)), tensors, problems)

    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _stored(value, place, tensors, problems)
    if isinstance(value, np.generic):  # before float: np.float64 is one
        if value.dtype.kind not in _NUMBERS:
            problems.append(f"{_shown(place)}: a numpy value of dtype {value.dtype}")
            return None
        return {"$scalar": [value.dtype.name, inner("", value.item())]}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) in (list, tuple, deque):
        items = [inner(i, item) for i, item in enumerate(value)]
        if isinstance(value, deque):
            return {"$deque": [items, value.maxlen]}
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(key, item) for key, item in value.items()}
        return {"$map": [[inner("(key)", key), inner(key, item)] for key, item in value.items()]}
    problems.append(f"{_shown(place)}: a {type(value).__module__}.{type(value).__qualname__}")
    return None


def _stored(
    value: torch.Tensor | np.ndarray,
    place: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    problems: list[str],
) -> Any:
    key = f"{len(tensors)}:{'.'.join(place)}"
    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach().cpu().clone()
        return {"$tensor": key}
    if value.dtype.kind not in _NUMBERS or not value.dtype.isnative:
        problems.append(f"{_shown(place)}: a numpy array of dtype {value.dtype}")
        return None
    tensors[key] = torch.from_numpy(value.copy())
    return {"$array": key}


def _shown(place: tuple[str, ...]) -> str:
    return ".".join(place) or "the state itself"


def _decoded(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not next(iter(tree)).startswith("$"):
        return {key: _decoded(item, tensors) for key, item in tree.items()}
    [(tag, content)] = tree.items()
    if tag == "$tensor":
        return tensors[content]
    if tag == "$array":
        return tensors[content].numpy()
    if tag == "$scalar":
        dtype = np.dtype(content[0])
        if dtype.kind not in _NUMBERS:
            raise StateFileError(f"a numpy value of dtype {dtype} is no value of a state")
        return dtype.type(_decoded(content[1], tensors))
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$tuple":
        return tuple(_decoded(item, tensors) for item in content)
    if tag == "$deque":
        return deque([_decoded(item, tensors) for item in content[0]], content[1])
    if tag == "$map":
        return {_decoded(key, tensors): _decoded(item, tensors) for key, item in content}
    raise StateFileError(f"{tag!r}: {str(content)[:80]!r} is no value of a state")
