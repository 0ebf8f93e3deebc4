"""The definitions: each operator once, in plain torch, on any device. Every other implementation is tested against these."""

from precision_kernels.reference.exact import align, exp, lane_sum, log
from precision_kernels.reference.formats import BLOCK, FP8, FP8_MAX, SCALE_FLOOR, Quantised
from precision_kernels.reference.matmul import (
    AlignedWeight,
    block_fp8_matmul,
    dgrad_fp8_matmul,
    invariant_matmul,
    wgrad_fp8_matmul,
)
from precision_kernels.reference.quantise import quantise_activation, quantise_columns, quantise_weight

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "SCALE_FLOOR",
    "AlignedWeight",
    "Quantised",
    "align",
    "block_fp8_matmul",
    "dgrad_fp8_matmul",
    "exp",
    "invariant_matmul",
    "lane_sum",
    "log",
    "quantise_activation",
    "quantise_columns",
    "quantise_weight",
    "wgrad_fp8_matmul",
]
