"""precision_kernels: the numerical operators that learner and rollout engine share. It knows tensors only."""

from precision_kernels.reference import (
    BLOCK,
    FP8,
    FP8_MAX,
    SCALE_FLOOR,
    AlignedWeight,
    Quantised,
    block_fp8_matmul,
    dgrad_fp8_matmul,
    invariant_matmul,
    quantise_activation,
    quantise_columns,
    quantise_weight,
    wgrad_fp8_matmul,
)

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "SCALE_FLOOR",
    "AlignedWeight",
    "Quantised",
    "block_fp8_matmul",
    "dgrad_fp8_matmul",
    "invariant_matmul",
    "quantise_activation",
    "quantise_columns",
    "quantise_weight",
    "wgrad_fp8_matmul",
]
