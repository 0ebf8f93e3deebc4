"""Offers the definitions to the dispatch: the CPU's implementations, and any device's on request."""

from __future__ import annotations

import torch

from precision_kernels.dispatch import Implementation
from precision_kernels.reference import activation, attention, fused, logprobs, matmul, norm, quantise, rotary

_FUNCTIONS = (
    quantise.quantise_activation,
    quantise.quantise_columns,
    quantise.quantise_weight,
    matmul.block_fp8_matmul,
    matmul.dgrad_fp8_matmul,
    matmul.wgrad_fp8_matmul,
    matmul.invariant_matmul,
    matmul.pack_weight,
    matmul.dgrad_matmul,
    matmul.wgrad_matmul,
    norm.rms_norm,
    norm.add_rms_norm,
    norm.rms_norm_backward,
    fused.rms_norm_quantise,
    fused.add_rms_norm_quantise,
    activation.silu_mul,
    activation.silu_mul_backward,
    fused.silu_mul_quantise,
    rotary.rotary_cos_sin,
    rotary.rotary,
    rotary.rotary_backward,
    attention.allocate_kv_cache,
    attention.attention,
    attention.attention_backward,
    logprobs.token_logprobs,
    logprobs.token_logprobs_backward,
    logprobs.log_softmax,
    logprobs.log_softmax_backward,
)


def implementations() -> dict[str, Implementation]:
    """Every operator by its definition."""
    version = f"torch-{torch.__version__}"
    return {f.__name__: Implementation(f"reference.{f.__name__}", version, f) for f in _FUNCTIONS}
