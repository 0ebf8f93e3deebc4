"""A policy as YAML text for people: complete, commented, and read back exactly."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import typing
from typing import Any

from omegaconf import OmegaConf

from .coerce import describe, hints, optional_part
from .policy import PrecisionPolicy

_WIDTH = 100


def to_yaml(policy: PrecisionPolicy, comments: bool = True) -> str:
    """YAML of the whole tree; `from_yaml` of it equals `policy`. Comments are the fields' descriptions."""
    lines = (
        [f"# {line}" for line in textwrap.wrap(f"fingerprint {policy.fingerprint}", _WIDTH)]
        if comments
        else []
    )
    _section(policy, lines, 0, comments)
    return "\n".join(lines) + "\n"


def _section(part: Any, lines: list[str], depth: int, comments: bool) -> None:
    pad, types = "  " * depth, hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if comments:
            if dataclasses.is_dataclass(value):
                lines.append("")
            nested = dataclasses.is_dataclass(value)
            text = field.metadata["doc"] + ("" if nested else f" [{describe(types[field.name])}]")
            lines += [f"{pad}# {line}" for line in textwrap.wrap(text, _WIDTH - len(pad))]
        if dataclasses.is_dataclass(value):
            lines.append(f"{pad}{field.name}:")
            _section(value, lines, depth + 1, comments)
        else:
            lines += [pad + line for line in _entry(field.name, value, types[field.name])]


def _entry(key: str, value: Any, hint: Any) -> list[str]:
    """Lines of `key: value`. Closed choices and numbers need no quotes; everything else is left to YAML."""
    if value is None or isinstance(value, bool | int | float):
        return [f"{key}: {json.dumps(value)}"]
    if typing.get_origin(optional_part(hint) or hint) is typing.Literal:
        return [f"{key}: {value}"]
    plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value
    return OmegaConf.to_yaml(OmegaConf.create({key: plain}), sort_keys=True).rstrip("\n").split("\n")
