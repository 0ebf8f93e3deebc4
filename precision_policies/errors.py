"""What this package raises: every violation of one check at once, each with key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong: where (`key`), what stands there (`value`), why, and what to do about it.

    key: dotted name of a setting; empty where it is none (a file, an override). value: `MISSING` is not shown.
    remedy: empty where `problem` already says it.
    """

    key: str
    value: object
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is MISSING else f" = {shorten(self.value)}"
        start = f"{self.key}{shown}: " if self.key else ""
        return f"{start}{self.problem}{f' -> {self.remedy}' if self.remedy else ''}"


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"

    def __reduce__(self) -> str:  # stays the one object when an error crosses process boundaries
        return "MISSING"


MISSING = _Missing()


class InputError(Exception):
    """What somebody gave cannot be used, and the text says what to do: command lines end with status 2."""


class ListOfViolations(Exception):
    """An error whose text is a numbered list. subject: what was checked. violations: everything found."""

    noun = "violation"
    violations: tuple[Violation, ...]

    def __init__(self, subject: str, violations: Iterable[Violation]):
        self.subject, self.violations = subject, tuple(violations)
        count = f"{len(self.violations)} {self.noun}{'s' if len(self.violations) != 1 else ''}"
        lines = [f"  {number}. {violation}" for number, violation in enumerate(self.violations, 1)]
        super().__init__("\n".join([f"{subject}: {count}", *lines]))

    def __reduce__(self) -> Any:  # crosses process boundaries (Ray) as what it is
        return type(self), (self.subject, self.violations)


class PolicyError(ListOfViolations, InputError, ValueError):
    """A policy, a policy file or a policy on a model that cannot be; `.violations` lists everything found."""


class PrecisionMismatchError(ListOfViolations, RuntimeError):
    """Two sides of a run that do not compute under the same precision contract; `.violations` lists all."""


class PrecisionOverrideWarning(UserWarning):
    """A policy lets an operator differ between the sides: no longer on-policy by construction."""


def shorten(value: object, limit: int = 80) -> str:
    """`repr`, cut in its middle to `limit` characters, so that a hostile value cannot flood a message and a path keeps
    the name of its file."""
    if isinstance(value, dict | list | tuple) and len(value) >= 32:
        text = f"<{len(value)} entries>"
    else:
        try:
            text = repr(value)
        except ValueError:  # Python writes no whole number of more than 4 300 digits
            text = f"<{type(value).__name__} too long to write>"
    if len(text) <= limit:
        return text
    tail = limit // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def closest(word: object, options: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the nearest of `options`, or an empty string."""
    near = difflib.get_close_matches(str(word)[:64], list(options), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
