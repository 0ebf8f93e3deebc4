"""What this package raises: every violation of one check at once, each with key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong: where (`key`), what stands there (`value`), why, and what to do about it."""

    key: str
    value: object
    problem: str
    remedy: str

    def __str__(self) -> str:
        shown = "" if self.value is MISSING else f" = {shorten(self.value)}"
        return f"{self.key}{shown}: {self.problem} -> {self.remedy}"


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"

    def __reduce__(self) -> str:  # stays the one object when an error crosses process boundaries
        return "MISSING"


MISSING = _Missing()


class _ListOfViolations:
    violations: tuple[Violation, ...]

    def _message(self, subject: str, violations: Sequence[Violation]) -> str:
        count = f"{len(violations)} violation{'s' if len(violations) != 1 else ''}"
        return "\n".join([f"{subject}: {count}", *(f"  {i}. {v}" for i, v in enumerate(violations, 1))])


class PolicyError(_ListOfViolations, ValueError):
    """A policy, a policy file or a policy on a model that cannot be; `.violations` lists everything found."""

    def __init__(self, subject: str, violations: Iterable[Violation]):
        self.subject, self.violations = subject, tuple(violations)
        super().__init__(self._message(subject, self.violations))

    def __reduce__(self):  # crosses process boundaries (Ray) as what it is
        return type(self), (self.subject, self.violations)


class PrecisionMismatchError(_ListOfViolations, RuntimeError):
    """Two sides of a run that do not compute under the same precision contract; `.violations` lists all."""

    def __init__(self, subject: str, violations: Iterable[Violation]):
        self.subject, self.violations = subject, tuple(violations)
        super().__init__(self._message(subject, self.violations))

    def __reduce__(self):
        return type(self), (self.subject, self.violations)


class PrecisionOverrideWarning(UserWarning):
    """A policy lets an operator differ between the sides: no longer on-policy by construction."""


def shorten(value: object, limit: int = 80) -> str:
    """`repr`, cut to `limit` characters so that a hostile value cannot flood a message."""
    text = (
        repr(value)
        if not isinstance(value, dict | list | tuple) or len(value) < 32
        else f"<{len(value)} entries>"
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def closest(word: object, options: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the nearest of `options`, or an empty string."""
    near = difflib.get_close_matches(str(word)[:64], list(options), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
