"""The definitions: each operator once, in plain torch, on any device.

Every other implementation is tested against these. Forward functions also return what their backward needs
(rstd, log-sum-exp); `precision_kernels.operators` pairs them for autograd.
"""

from precision_kernels.reference.activation import silu_mul, silu_mul_backward
from precision_kernels.reference.attention import KVCache, allocate_kv_cache, attention, attention_backward
from precision_kernels.reference.digest import tensor_digest
from precision_kernels.reference.exact import align, exp, lane_sum, log
from precision_kernels.reference.formats import BLOCK, FP8, FP8_MAX, SCALE_FLOOR, Quantised
from precision_kernels.reference.fused import (
    add_rms_norm_quantise,
    norm_rotary,
    rms_norm_quantise,
    rms_norm_quantise_columns,
    silu_mul_backward_quantise_both,
    silu_mul_backward_saved,
    silu_mul_quantise,
    silu_mul_quantise_both,
    silu_mul_saving,
)
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.reference.logprobs import (
    log_softmax,
    log_softmax_backward,
    token_logprobs,
    token_logprobs_backward,
)
from precision_kernels.reference.matmul import (
    AlignedWeight,
    block_fp8_matmul,
    dgrad_fp8_matmul,
    dgrad_matmul,
    invariant_matmul,
    pack_weight,
    wgrad_fp8_matmul,
    wgrad_matmul,
)
from precision_kernels.reference.norm import add_rms_norm, rms_norm, rms_norm_backward
from precision_kernels.reference.quantise import (
    dequantise,
    quantise_activation,
    quantise_both,
    quantise_columns,
    quantise_weight,
)
from precision_kernels.reference.rotary import rotary, rotary_backward, rotary_backward_joint, rotary_cos_sin

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "SCALE_FLOOR",
    "AlignedWeight",
    "AttentionLayout",
    "KVCache",
    "Quantised",
    "add_rms_norm",
    "add_rms_norm_quantise",
    "align",
    "allocate_kv_cache",
    "attention",
    "attention_backward",
    "block_fp8_matmul",
    "dequantise",
    "dgrad_fp8_matmul",
    "dgrad_matmul",
    "exp",
    "invariant_matmul",
    "lane_sum",
    "log",
    "log_softmax",
    "log_softmax_backward",
    "norm_rotary",
    "pack_weight",
    "quantise_activation",
    "quantise_both",
    "quantise_columns",
    "quantise_weight",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_quantise",
    "rms_norm_quantise_columns",
    "rotary",
    "rotary_backward",
    "rotary_backward_joint",
    "rotary_cos_sin",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_backward_quantise_both",
    "silu_mul_backward_saved",
    "silu_mul_quantise",
    "silu_mul_quantise_both",
    "silu_mul_saving",
    "tensor_digest",
    "token_logprobs",
    "token_logprobs_backward",
    "wgrad_fp8_matmul",
    "wgrad_matmul",
]
