"""What this package raises for wrong input; every message says what to do."""

from __future__ import annotations

from rllib_llm.errors import InputError, RllibLLMError

__all__ = ["RegistryError"]


class RegistryError(RllibLLMError, InputError, ValueError):
    """A model, run, checkpoint or registry that cannot be used as asked."""
