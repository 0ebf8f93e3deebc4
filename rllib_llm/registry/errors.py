"""What this package raises for wrong input; every message says what to do."""

from __future__ import annotations

__all__ = ["RegistryError"]


class RegistryError(ValueError):
    """A model, run, checkpoint or registry that cannot be used as asked."""
