"""What is raised for a config that cannot be run."""

from __future__ import annotations

from rllib_llm.errors import SettingsError

__all__ = ["ExperimentError"]


class ExperimentError(SettingsError):
    """An experiment that cannot be run; `.violations` lists every problem, `.problems` the same as sentences."""
