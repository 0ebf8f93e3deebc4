"""The base of every error that this package raises deliberately, and errors that several packages share."""

from __future__ import annotations

from precision_policies.errors import InputError, ListOfViolations, Violation

__all__ = ["EngineError", "InputError", "RllibLLMError", "SettingsError", "violations_of"]


class RllibLLMError(Exception):
    """What is wrong, why, and what to do about it. Everything else that is raised is a fault of the program.

    An error of what somebody gave is an `InputError` too; one without it is of a part that was running.
    """


class SettingsError(ListOfViolations, RllibLLMError, InputError, ValueError):
    """Settings that cannot be; `.violations` lists everything found, each under the setting's dotted name."""

    noun = "problem"

    @property
    def problems(self) -> tuple[str, ...]:
        """The violations as sentences."""
        return tuple(map(str, self.violations))


class LearnerMemoryError(RllibLLMError, RuntimeError):
    """The learner's smallest micro-batch does not fit its memory."""


class EngineError(RllibLLMError, RuntimeError):
    """An engine could not do what was asked; nothing half-done is returned."""


def violations_of(error: Exception) -> tuple[Violation, ...]:
    """What `error` lists, or its text as one violation that names no setting."""
    if isinstance(error, ListOfViolations):
        return error.violations
    return (Violation("", None, str(error)),)
