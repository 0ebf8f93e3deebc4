"""From plain dicts to the sections of `settings.groups`: every problem at once, and which settings have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from precision_policies.coerce import convert, describe, hints
from precision_policies.errors import Violation
from rllib_llm.settings.names import unknown

__all__ = ["defaults", "plain", "read"]

S = TypeVar("S")


def defaults(cls: type) -> dict[str, Any]:
    """The default values of a section as a plain dict."""
    return plain(cls())


def plain(value: Any) -> Any:
    """Plain dicts, lists and scalars of a section; `read` turns them back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def read(cls: type[S], data: Mapping[Any, Any], path: str, found: list[Violation], bad: set[str]) -> S:
    """An instance of section `cls`, called `path` (empty for the whole experiment).

    found: gets a violation per unknown key, ill-typed value and value out of range. bad: gets the dotted names of
    settings whose default stands for a value that cannot be used; a rule that reads one of them says nothing.
    """
    values: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in fields:
            found.append(unknown(name, value))
            continue
        hint = hints(cls)[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _section(cast(type, hint), value, name, found, bad)
            continue
        wrong: list[Violation] = []
        values[key] = convert(hint, value, name, fields[key].metadata, wrong)
        if wrong:
            del values[key]
            found += wrong
            bad.add(name)
    return cls(**values)


def _section(cls: type, value: Any, name: str, found: list[Violation], bad: set[str]) -> Any:
    if isinstance(value, Mapping):
        return read(cls, value, name, found, bad)
    found.append(Violation(name, value, "is no section", f"give {describe(cls)}"))
    bad |= {f"{name}.{field}" for field in hints(cls)}
    return cls()
