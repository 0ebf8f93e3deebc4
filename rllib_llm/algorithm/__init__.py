"""The RLlib side: configuration and algorithm."""

from rllib_llm.algorithm.config import GRPOConfig
from rllib_llm.algorithm.grpo import GRPO
from rllib_llm.algorithm.variants import DAPOConfig, DrGRPOConfig, GSPOConfig, ReinforcePPConfig, RLOOConfig

__all__ = [
    "GRPO",
    "DAPOConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "RLOOConfig",
    "ReinforcePPConfig",
]
