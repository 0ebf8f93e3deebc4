"""From plain data to frozen dataclasses: the one reader of settings and policies.

Every problem is collected, nothing is guessed or silently converted. A field is described by its annotation (bool, int,
float, str, Literal, `X | None` and other unions, tuples, mappings, dataclasses) and its metadata, which `setting` and
`schema.doc` write: doc, low, high (inclusive), above, below (exclusive). A field without a default must be given.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from typing import Any, get_args, get_origin

from .errors import MISSING, Violation, closest, shorten
from .schema import DTYPE_OF_FORMAT, FORMAT_OF_DTYPE

_HINTS: dict[type, dict[str, Any]] = {}
_NAMES: dict[Any, str] = {bool: "true | false", int: "a whole number", float: "a number", str: "a text"}
_BOUNDS = {"low": ">=", "above": ">", "high": "<=", "below": "<"}


def setting(default: Any, doc: str, *, hint: str = "", choices: str = "", **bounds: float) -> Any:
    """A dataclass field with a default, described by `doc`.

    hint: why a value out of range cannot be, and what to set instead. choices: what a text may say, where the
    annotation does not. bounds: low, high (inclusive), above, below (exclusive).
    """
    metadata = {"doc": doc, "hint": hint, "choices": choices, "references": True, **bounds}
    if isinstance(default, (dict, list)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, in field order."""
    if cls not in _HINTS:
        _HINTS[cls] = _resolved(cls)
    return _HINTS[cls]


def _resolved(cls: type) -> dict[str, Any]:
    resolved = typing.get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def is_union(hint: Any) -> bool:
    """Whether a type is `X | Y`, however it is written."""
    return get_origin(hint) in (typing.Union, types.UnionType)


def optional_part(hint: Any) -> Any | None:
    """The type inside `X | None`, or None if `hint` is not optional."""
    if is_union(hint):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return None


def describe(hint: Any) -> str:
    """The allowed values of a field in words: `a whole number`, `a list of texts`, `k1 | k2 | k3`."""
    if is_union(hint):
        options = [describe(arg) for arg in get_args(hint) if arg is not type(None)]
        return " or ".join([*options, *["null"] * (type(None) in get_args(hint))])
    if get_origin(hint) is typing.Literal:
        return " | ".join(map(str, get_args(hint)))
    if dataclasses.is_dataclass(hint):
        return "a section with " + ", ".join(hints(typing.cast(type, hint)))
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        count = "" if rest == [...] else f"{len(rest) + 1} "
        return f"a list of {count}{_many(first)}"
    if get_origin(hint) is dict:
        key, value = (describe(arg).removeprefix("a ") for arg in get_args(hint))
        return f"a mapping from {key} to {value}"
    return "a mapping" if hint is dict else _NAMES[hint]


def _many(hint: Any) -> str:
    plural = {int: "whole numbers", float: "numbers", str: "texts", bool: "true | false"}
    return plural.get(hint) or describe(hint).replace("a list of", "lists of")


def bounds_in_words(meta: typing.Mapping[str, Any]) -> str:
    """`>= 1`, `> 0, <= 1`; an empty text where there are none."""
    limits = {word: meta[name] for name, word in _BOUNDS.items() if meta.get(name) is not None}
    return ", ".join(f"{word} {f'{n:g}' if isinstance(n, float) else n}" for word, n in limits.items())


def build(cls: type, data: Any, path: str, found: list[Violation]) -> Any:
    """An instance of dataclass `cls` from mapping `data`, or None; problems are appended to `found`."""
    if not isinstance(data, typing.Mapping):
        found.append(Violation(path, data, "must be a mapping", f"give {describe(cls)}"))
        return None
    before = len(found)
    values = build_parts(cls, data, path, found)
    return None if len(found) > before else cls(**values)


def build_parts(
    cls: type, data: typing.Mapping[Any, Any], path: str, found: list[Violation]
) -> dict[str, Any]:
    """The well-formed fields of `cls` in `data`; the others are left out and described in `found`.

    A field with a default that `data` does not have is left out without a word.
    """
    allowed, values = hints(cls), {}
    for key in data:
        if key not in allowed:
            where = _join(path, key if isinstance(key, str) else shorten(key))
            remedy = f"remove it; allowed here: {', '.join(allowed)}"
            found.append(Violation(where, data[key], f"unknown key{closest(key, allowed)}", remedy))
    for field in dataclasses.fields(cls):
        where, before = _join(path, field.name), len(found)
        if field.name not in data:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                remedy = (
                    f"give {describe(allowed[field.name])}, or inherit it, for example with 'extends: bf16'"
                )
                found.append(Violation(where, MISSING, "missing", remedy))
            continue
        value = convert(allowed[field.name], data[field.name], where, field.metadata, found)
        if len(found) == before:
            values[field.name] = value
    return values


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def convert(hint: Any, value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> Any:
    """`value` as `hint` wants it (int -> float, list -> tuple, nothing else); what is wrong goes to `found`."""
    if is_union(hint):
        return _union(hint, value, where, meta, found)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, found)
    if get_origin(hint) is typing.Literal:
        return _literal(get_args(hint), value, where, found)
    if get_origin(hint) is tuple:
        return _tuple(hint, value, where, meta, found)
    if get_origin(hint) is dict:
        return _mapping(hint, value, where, meta, found)
    if hint is float:
        return _number(value, where, meta, found)
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's, as a search may draw it
    if type(value) is not hint:
        found.append(Violation(where, value, f"is not {describe(hint)}", f"give {describe(hint)}"))
        return None
    if hint is str and "${" in value and not meta.get("references"):
        return _interpolation(value, where, found)
    if hint is int:
        return _whole(value, where, meta, found)
    return value


def _union(hint: Any, value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> Any:
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    if value is None and type(None) in get_args(hint):
        return None
    if len(options) == 1:
        return convert(options[0], value, where, meta, found)
    for option in options:
        unlike: list[Violation] = []
        converted = convert(option, value, where, meta, unlike)
        if not unlike:
            return converted
        if _is_of(option, value):  # the kind that was meant: its own words are the better ones
            found += unlike
            return None
    found.append(Violation(where, value, f"is not {describe(hint)}", f"give {describe(hint)}"))
    return None


def _is_of(hint: Any, value: Any) -> bool:
    """Whether `value` is of the outer type of `hint`, whatever it holds."""
    kinds = {tuple: (list, tuple), dict: (dict,), float: (int, float)}
    origin = get_origin(hint) or hint
    return not isinstance(value, bool) and isinstance(value, kinds.get(origin, origin))


def _literal(options: tuple[Any, ...], value: Any, where: str, found: list[Violation]) -> Any:
    if isinstance(value, str) and value in options:
        return value
    other = {**FORMAT_OF_DTYPE, **DTYPE_OF_FORMAT}.get(value) if isinstance(value, str) else None
    hint = f" (did you mean '{other}'?)" if other in options else closest(value, options)
    found.append(Violation(where, value, f"not allowed{hint}", f"use one of {' | '.join(options)}"))
    return None


def _tuple(hint: Any, value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> Any:
    first, *rest = get_args(hint)
    many = rest == [...]
    kinds = [first] * len(value) if many and isinstance(value, list | tuple) else [first, *rest]
    if not isinstance(value, list | tuple) or len(value) != len(kinds) or not all(map(_is_of, kinds, value)):
        empty = ", [] for none" if many else ""
        remedy = f"give {describe(hint) if first is not str else 'a list'}{empty}"
        found.append(Violation(where, value, f"is not {describe(hint)}", remedy))
        return None
    return tuple(
        convert(kind, item, f"{where}[{index}]", meta, found)
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _mapping(
    hint: Any, value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]
) -> Any:
    kinds = get_args(hint)
    if not isinstance(value, dict) or not all(
        _is_of(kind, part) for pair in value.items() for kind, part in zip(kinds, pair, strict=True)
    ):
        found.append(Violation(where, value, f"is not {describe(hint)}", "give a mapping, {} for none"))
        return None
    out = {}
    for key, item in value.items():
        if "${" in key and not meta.get("references"):
            _interpolation(item, _join(where, key), found)
            continue
        out[key] = convert(kinds[1], item, _join(where, key), meta, found)
    return FrozenDict(out)


def _interpolation(value: str, where: str, found: list[Violation]) -> None:
    problem = "contains '${': a policy says the same in every process, so it cannot refer to anything outside"
    found.append(Violation(where, value, problem, "write the value itself"))


def _number(value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> float | None:
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


def _whole(value: int, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> int | None:
    """In range, and within the 64 bits that torch, Ray and MLflow have for a whole number."""
    before = len(found)
    value = _in_range(value, where, meta, found)
    if len(found) > before or -(2**63) <= value < 2**63:
        return value
    found.append(
        Violation(where, value, "out of range", "must fit into 64 bits, at most 9223372036854775807")
    )
    return None


def _in_range(value: Any, where: str, meta: typing.Mapping[str, Any], found: list[Violation]) -> Any:
    low, high, above, below = (meta.get(name) for name in ("low", "high", "above", "below"))
    if (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        if low is not None and high is not None and isinstance(low, float):
            allowed = f"choose from {low:g} to {high:g}"
        elif low is not None and high is not None:
            allowed = f"choose from {low} to {high}"
        else:
            allowed = f"must be {bounds_in_words(meta)}"
        allowed += f"; {meta['hint']}" if meta.get("hint") else ""
        found.append(Violation(where, value, "out of range", allowed))
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
