"""Older policy files: brought up to date where that cannot change numbers, otherwise told what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import MISSING, PolicyError, Violation
from .schema import SCHEMA_VERSION

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: dict[int, Migration] = {}
"""Version -> function from a tree of that version (perhaps partial, as in a file that extends) to the next
one. A change that cannot be made without changing numbers raises PolicyError and says what to write
instead."""


def migrate(data: dict[str, Any], origin: str) -> dict[str, Any]:
    """A copy of `data` in the current schema. Raises PolicyError for a missing or unknown version."""
    version = data.get("schema_version", MISSING)
    if type(version) is not int:
        raise PolicyError(f"policy ({origin})", [no_version(version)])
    if version > SCHEMA_VERSION:
        problem = f"is newer than this version of precision_policies knows ({SCHEMA_VERSION})"
        raise _refused(
            origin,
            version,
            problem,
            f"upgrade rllib-llm, or write schema_version: {SCHEMA_VERSION} and its keys",
        )
    data = dict(data)
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise _refused(origin, version, "is not a version that ever was", f"write {SCHEMA_VERSION}")
        data = MIGRATIONS[step](data)
    return {**data, "schema_version": SCHEMA_VERSION}


def no_version(version: Any = MISSING) -> Violation:
    """Of a file without a version, or with something else in its place."""
    problem = "missing" if version is MISSING else "is not a whole number"
    return Violation("schema_version", version, problem, f"write schema_version: {SCHEMA_VERSION}")


def _refused(origin: str, version: int, problem: str, remedy: str) -> PolicyError:
    return PolicyError(f"policy ({origin})", [Violation("schema_version", version, problem, remedy)])
