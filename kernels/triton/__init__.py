"""Triton kernels: the operators on Hopper, and under Triton's interpreter on a CPU, bit-equal to the reference.

Importing this package needs ``triton`` (an ImportError says so; the dispatch reports it by name).
"""

from __future__ import annotations

import torch
import triton

from precision_kernels.dispatch import Implementation, bind
from precision_kernels.reference.rotary import rotary_cos_sin
from precision_kernels.triton import (
    activation,
    activation_codes,
    digest,
    logprobs,
    matmul,
    norm,
    norm_columns,
    norm_rotary,
    quantise,
    rotary,
)

_FUNCTIONS = (
    quantise.quantise_activation,
    quantise.quantise_columns,
    quantise.quantise_both,
    quantise.quantise_weight,
    quantise.dequantise,
    norm.rms_norm,
    norm.add_rms_norm,
    norm.rms_norm_backward,
    norm.rms_norm_quantise,
    norm.add_rms_norm_quantise,
    norm_columns.rms_norm_quantise_columns,
    activation.silu_mul,
    activation.silu_mul_backward,
    activation.silu_mul_quantise,
    activation.silu_mul_saving,
    activation.silu_mul_backward_saved,
    activation_codes.silu_mul_quantise_both,
    activation_codes.silu_mul_backward_quantise_both,
    rotary.rotary,
    rotary.rotary_backward,
    rotary.rotary_backward_joint,
    norm_rotary.norm_rotary,
    logprobs.token_logprobs,
    logprobs.token_logprobs_backward,
    logprobs.log_softmax,
    logprobs.log_softmax_backward,
    digest.tensor_digest,
)
_MATMULS = (matmul.block_fp8_matmul, matmul.dgrad_fp8_matmul, matmul.wgrad_fp8_matmul)


def version() -> str:
    """What of the installed software decides a Triton kernel's bits."""
    return f"triton-{triton.__version__}"


def implementations() -> dict[str, Implementation]:
    """Every operator with a Triton kernel, and the rotary table, which is made once and needs none.

    The FP8 GEMMs are not among them: DeepGEMM is what this library is measured with, and a slower GEMM must not take
    its place unasked (`bind_matmuls`).
    """
    offered = {f.__name__: Implementation(f"triton.{f.__name__}", version(), f) for f in _FUNCTIONS}
    table = Implementation("reference.rotary_cos_sin", f"torch-{torch.__version__}", rotary_cos_sin)
    return offered | {"rotary_cos_sin": table}


def bind_matmuls(device_type: str = "cuda") -> None:
    """Use the Triton FP8 GEMMs for every shape, for machines without DeepGEMM. `bound_implementations` then says so."""
    for function in _MATMULS:
        bind(
            function.__name__, device_type, Implementation(f"triton.{function.__name__}", version(), function)
        )


__all__ = ["bind_matmuls", "implementations", "version"]
