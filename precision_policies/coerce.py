"""From plain data to the typed tree: every problem is collected, nothing is guessed or silently converted."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, get_args, get_origin

from .errors import MISSING, Violation, closest, shorten
from .schema import DTYPE_OF_FORMAT, FORMAT_OF_DTYPE

_HINTS: dict[type, dict[str, Any]] = {}


def hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, in field order."""
    if cls not in _HINTS:
        _HINTS[cls] = _resolved(cls)
    return _HINTS[cls]


def _resolved(cls: type) -> dict[str, Any]:
    resolved = typing.get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def optional_part(hint: Any) -> Any | None:
    """The type inside `X | None`, or None if `hint` is not optional."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return None


def describe(hint: Any) -> str:
    """The allowed values of a field in words."""
    inner = optional_part(hint)
    if inner is not None:
        return f"{describe(inner)} or null"
    if get_origin(hint) is typing.Literal:
        return " | ".join(get_args(hint))
    if dataclasses.is_dataclass(hint):
        return "a section with " + ", ".join(hints(typing.cast(type, hint)))
    names: dict[Any, str] = {bool: "true | false", int: "a whole number", float: "a number", str: "a text"}
    if hint in names:
        return names[hint]
    return "a list of texts" if get_origin(hint) is tuple else "a mapping from text to text"


def build(cls: type, data: Any, path: str, found: list[Violation]) -> Any:
    """An instance of dataclass `cls` from mapping `data`, or None; problems are appended to `found`."""
    if not isinstance(data, dict):
        found.append(Violation(path, data, "must be a mapping", f"give {describe(cls)}"))
        return None
    before = len(found)
    values = build_parts(cls, data, path, found)
    return None if len(found) > before else cls(**values)


def build_parts(cls: type, data: dict[Any, Any], path: str, found: list[Violation]) -> dict[str, Any]:
    """The well-formed fields of `cls` in `data`; the others are left out and described in `found`."""
    allowed, values = hints(cls), {}
    for key in data:
        if key not in allowed:
            where = _join(path, key if isinstance(key, str) else shorten(key))
            remedy = f"remove it; allowed here: {', '.join(allowed)}"
            found.append(Violation(where, data[key], f"unknown key{closest(key, allowed)}", remedy))
    for field in dataclasses.fields(cls):
        where, before = _join(path, field.name), len(found)
        if field.name not in data:
            remedy = f"give {describe(allowed[field.name])}, or inherit it, for example with 'extends: bf16'"
            found.append(Violation(where, MISSING, "missing", remedy))
            continue
        value = _value(allowed[field.name], data[field.name], where, field.metadata, found)
        if len(found) == before:
            values[field.name] = value
    return values


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value(hint: Any, value: Any, where: str, meta: Any, found: list[Violation]) -> Any:
    inner = optional_part(hint)
    if inner is not None:
        return None if value is None else _value(inner, value, where, meta, found)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, found)
    if get_origin(hint) is typing.Literal:
        return _literal(get_args(hint), value, where, found)
    if get_origin(hint) is tuple:
        return _texts(value, where, found)
    if get_origin(hint) is dict:
        return _mapping(value, where, found)
    if hint is float:
        return _number(value, where, meta, found)
    if type(value) is not hint:
        found.append(Violation(where, value, f"is not {describe(hint)}", f"give {describe(hint)}"))
        return None
    if hint is str and "${" in value:
        return _interpolation(value, where, found)
    if hint is int:
        return _in_range(value, where, meta, found)
    return value


def _literal(options: tuple[Any, ...], value: Any, where: str, found: list[Violation]) -> Any:
    if isinstance(value, str) and value in options:
        return value
    other = {**FORMAT_OF_DTYPE, **DTYPE_OF_FORMAT}.get(value) if isinstance(value, str) else None
    hint = f" (did you mean '{other}'?)" if other in options else closest(value, options)
    found.append(Violation(where, value, f"not allowed{hint}", f"use one of {' | '.join(options)}"))
    return None


def _texts(value: Any, where: str, found: list[Violation]) -> Any:
    if not isinstance(value, list | tuple) or any(type(item) is not str for item in value):
        found.append(Violation(where, value, "is not a list of texts", "give a list, [] for none"))
        return None
    for index, item in enumerate(value):
        if "${" in item:
            _interpolation(item, f"{where}[{index}]", found)
    return tuple(value)


def _mapping(value: Any, where: str, found: list[Violation]) -> Any:
    if not isinstance(value, dict) or any(type(part) is not str for pair in value.items() for part in pair):
        found.append(
            Violation(where, value, "is not a mapping from text to text", "give a mapping, {} for none")
        )
        return None
    for key, item in value.items():
        if "${" in item or "${" in key:
            _interpolation(item, _join(where, key), found)
    return FrozenDict(value)


def _interpolation(value: str, where: str, found: list[Violation]) -> None:
    problem = "contains '${': a policy says the same in every process, so it cannot refer to anything outside"
    found.append(Violation(where, value, problem, "write the value itself"))


def _number(value: Any, where: str, meta: Any, found: list[Violation]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        found.append(Violation(where, value, "is not a number", "give a number, without quotes"))
        return None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        found.append(Violation(where, value, "is not finite", "give a finite number"))
        return None
    return _in_range(number + 0.0, where, meta, found)  # + 0.0: -0.0 and 0.0 are one number, one fingerprint


def _in_range(value: Any, where: str, meta: Any, found: list[Violation]) -> Any:
    low, high = meta.get("low"), meta.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        found.append(Violation(where, value, "out of range", f"choose from {low:g} to {high:g}"))
        return None
    return value


class FrozenDict(dict):
    """A dict that refuses changes and can be hashed, so that a policy stays frozen all the way down."""

    def _refuse(self, *_: Any, **__: Any) -> typing.NoReturn:
        raise TypeError("a policy is frozen; make a new one with load_policy({'extends': policy.name, ...})")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)
