"""The console script `rllib-llm`."""

from rllib_llm.cli.main import main

__all__ = ["main"]
