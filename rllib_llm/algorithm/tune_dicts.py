"""Dicts as Tune makes them: names of a YAML file, nested or in one, sorted into what `GRPOConfig` holds where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllib_llm.settings.groups import GROUPS, SECTIONS
from rllib_llm.settings.names import ATTRIBUTES, SHORTHANDS, renamed

__all__ = ["Change", "sections_of", "set_in", "show_in_place"]

Path = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """attributes: for RLlib's own update. settings: (path in a section, value), nested ones first. env_config: (path in
    it, value). unknown: names that there are not, or that have another name now."""

    attributes: dict[str, Any] = field(default_factory=dict)
    settings: list[tuple[Path, Any]] = field(default_factory=list)
    env_config: list[tuple[Path, Any]] = field(default_factory=list)
    unknown: dict[str, Any] = field(default_factory=dict)


def sections_of(config: Mapping[str, Any]) -> Change:
    """Sort a (partial) config dict: nested sections first, then names in one, which win."""
    change = Change()
    for key, value in config.items():
        if len(_path(key)) == 1:
            _sort(change, (key,), value)
    for key, value in config.items():
        if len(_path(key)) > 1:
            _sort(change, _path(key), value)
    return change


def _path(key: str) -> Path:
    return tuple(key.replace(".", "/").split("/"))


def _sort(change: Change, path: Path, value: Any) -> None:
    name, first = ".".join(path), path[0]
    searched = isinstance(value, Mapping) and "grid_search" in value
    if len(path) == 1 and first in SHORTHANDS and (searched or not isinstance(value, Mapping)):
        path, name = _path(SHORTHANDS[first]), SHORTHANDS[first]
    if first in GROUPS:
        if len(path) == 1 and isinstance(value, Mapping):
            change.settings.extend(((first, key), part) for key, part in value.items())
        else:
            change.settings.append((path, value))
    elif first in SECTIONS:
        for leaf, part in _leaves(name, value):
            if leaf in ATTRIBUTES:
                change.attributes[ATTRIBUTES[leaf]] = part
            elif path[:2] == ("env", "config"):
                change.env_config.append((path[2:], part))
            else:
                change.unknown[leaf] = part
    elif len(path) > 1 or renamed(first) is not None:
        change.unknown[name] = value
    else:
        change.attributes[first] = value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings in a nested section; one that is a mapping itself is one setting."""
    sections = (*SECTIONS, "run.resources")
    if name in sections and isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part)
    else:
        yield name, value


def set_in(tree: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of `tree` (of an empty dict where it is none) with `value` at `path`."""
    first, *rest = path
    known = dict(tree) if isinstance(tree, Mapping) else {}
    return {**known, first: set_in(known.get(first), rest, value) if rest else value}


def show_in_place(config: dict[str, Any]) -> None:
    """Write what names in one say ("rollout/temperature") into the nested section as well, in this dict.

    A trial's config is read by people and by callbacks; a nested default beside the drawn value would mislead both.
    """
    for key in [key for key in config if len(_path(key)) > 1]:
        path, name = _path(key), ".".join(_path(key))
        if path[0] in GROUPS:
            config[path[0]] = set_in(config.get(path[0]), path[1:], config[key])
        elif name in ATTRIBUTES:
            config[ATTRIBUTES[name]] = config[key]
        elif path[:2] == ("env", "config"):
            config["env_config"] = set_in(config.get("env_config"), path[2:], config[key])
