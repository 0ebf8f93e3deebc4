"""The RLlib side: configuration and algorithm.

Names are loaded when first used: checking settings (`algorithm.validation`) needs neither Ray nor RLlib, whose import
takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.algorithm.grpo import GRPO
    from rllib_llm.algorithm.variants import (
        DAPOConfig,
        DrGRPOConfig,
        GSPOConfig,
        ReinforcePPConfig,
        RLOOConfig,
    )

__all__ = [
    "GRPO",
    "DAPOConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "RLOOConfig",
    "ReinforcePPConfig",
]

_HOMES = {"GRPO": "grpo", "GRPOConfig": "config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'variants')}"), name)
