"""How a registered model is written: ``NAME@ALIAS``, ``NAME/VERSION``, with or without ``models:/`` in front."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rllib_llm.registry.errors import RegistryError

__all__ = ["SCHEME", "Reference", "is_registered", "name_problems", "parse_reference"]

SCHEME = "models:/"
_NAME = re.compile(r"[^/:@\s][^/:@]*")
_VERSION = re.compile(r"[0-9]{1,9}")  # a database keeps them as 32-bit numbers
_ALIAS = re.compile(r"[\w-]+")
_RESERVED_ALIAS = re.compile(r"latest|v\d+", re.IGNORECASE)  # MLflow reads these as versions


@dataclass(frozen=True)
class Reference:
    """One of `alias` and `version` is set; `name` alone means that neither was given."""

    name: str
    alias: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        if self.alias is not None:
            return f"{SCHEME}{self.name}@{self.alias}"
        return f"{SCHEME}{self.name}/{self.version}" if self.version is not None else f"{SCHEME}{self.name}"


def is_registered(model: object) -> bool:
    """Whether a model string means the registry."""
    return isinstance(model, str) and model.startswith(SCHEME)


def parse_reference(text: str) -> Reference:
    """See the module docstring. Raises RegistryError for anything else."""
    body = text.removeprefix(SCHEME)
    name, at, alias = body.partition("@")
    if not at:
        name, slash, version = body.partition("/")
        if _NAME.fullmatch(name) and (not slash or _VERSION.fullmatch(version)):
            return Reference(name, version=version if slash else None)
    elif _NAME.fullmatch(name) and _ALIAS.fullmatch(alias):
        return Reference(name, alias=alias)
    raise RegistryError(f"{text!r} names no registered model: write NAME@ALIAS or NAME/VERSION")


def name_problems(name: str, alias: str | None) -> list[str]:
    """What is wrong with a name and an alias to register under: MLflow's rules, and that both can be read back."""
    found = []
    if not _NAME.fullmatch(name) or len(name) > 256:
        found.append(f"--name {name!r}: 1 to 256 characters without / : @ and not starting with a space")
    if alias is not None and (not _ALIAS.fullmatch(alias) or _RESERVED_ALIAS.fullmatch(alias)):
        found.append(f"--alias {alias!r}: letters, digits, _ and - only, and neither 'latest' nor like 'v1'")
    return found
