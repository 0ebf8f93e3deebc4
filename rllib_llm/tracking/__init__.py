"""Experiment tracking: what a Tune run writes into an MLflow store, and how it gets there."""

from rllib_llm.tracking.delivery import DeliveryReport, send_spooled
from rllib_llm.tracking.mlflow_callback import MLflowCallback

__all__ = ["DeliveryReport", "MLflowCallback", "send_spooled"]
