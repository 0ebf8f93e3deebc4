"""The toy model and its algorithm, as in tests/rllib."""

from tests.rllib.conftest import build, toy_config, toy_model

__all__ = ["build", "toy_config", "toy_model"]
