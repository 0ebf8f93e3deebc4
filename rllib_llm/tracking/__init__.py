"""Experiment tracking: what a Tune run writes into an MLflow store, and how it gets there.

Names are loaded when first used: the callback imports Ray Tune, which those who only look at a store do not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.tracking.delivery import DeliveryReport, send_spooled
    from rllib_llm.tracking.mlflow_callback import MLflowCallback

__all__ = ["DeliveryReport", "MLflowCallback", "send_spooled"]

_HOMES = {"MLflowCallback": "mlflow_callback"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'delivery')}"), name)
