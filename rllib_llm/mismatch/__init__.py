"""Train-rollout mismatch: metrics (one documented table), buckets, aggregation by environment, probe by
layer."""

from rllib_llm.mismatch.layers import LayerMismatch, capture, compare_captures, first_difference, probe
from rllib_llm.mismatch.metrics import MismatchInputError, metrics, response_positions
from rllib_llm.mismatch.monitor import MismatchMonitor
from rllib_llm.mismatch.registry import METRICS, SIGN_CONVENTION, markdown_table
from rllib_llm.mismatch.sampling import require_comparable_sampling

__all__ = [
    "METRICS",
    "SIGN_CONVENTION",
    "LayerMismatch",
    "MismatchInputError",
    "MismatchMonitor",
    "capture",
    "compare_captures",
    "first_difference",
    "markdown_table",
    "metrics",
    "probe",
    "require_comparable_sampling",
    "response_positions",
]
