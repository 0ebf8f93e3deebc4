"""What is raised for a directory that is not what it should be."""

from __future__ import annotations

from rllib_llm.errors import InputError, RllibLLMError

__all__ = ["CheckpointError", "DirectoryError", "PrecisionChangeError"]


class DirectoryError(RllibLLMError, InputError, ValueError):
    """An experiment's directory, or a checkpoint in it, that cannot be used, and what to do about it."""

    def __init__(self, source: str, problem: str) -> None:
        self.source, self.problem = source, problem
        super().__init__(f"{source}: {problem}")


class CheckpointError(RllibLLMError, InputError, RuntimeError):
    """A checkpoint is incomplete or changed, or what was restored from it is not what was saved."""


class PrecisionChangeError(CheckpointError):
    """A checkpoint of one precision policy was to be continued under another."""
