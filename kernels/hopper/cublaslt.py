"""cuBLASLt's block-scaled FP8 GEMM for the weight gradient, behind ``reference.matmul.wgrad_fp8_matmul``.

Both operands are 1x128 along the contraction (the tokens). DeepGEMM multiplies them with a kernel that adds into
memory, which has to be zero-filled for a new gradient; cuBLASLt (12.9 and later, Hopper only, through
`torch.nn.functional.scaled_mm`) writes its result. So new gradients are cuBLASLt's, added ones DeepGEMM's: the faster
of the two for each (benchmarks/results/NOTES.md), with the same error, 1e-7 apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from precision_kernels.declaration import implements
from precision_kernels.hopper import deepgemm
from precision_kernels.reference.formats import BLOCK, Quantised
from precision_kernels.reference.matmul import check_contraction, check_kinds
from precision_kernels.registration import fake, operator

_VERSION = f"torch-{torch.__version__}+deep_gemm-{deepgemm.deep_gemm.__version__}"
_BLOCKS = F.ScalingType.BlockWise1x128


@operator("cublaslt_fp8_wgrad")
def _wgrad_op(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """fp32 a [N, M] @ b [K, M].T, e4m3 with contiguous rows; scales [N, M/128] and [K, M/128], column-major."""
    return F.scaled_mm(a, b.t(), a_scales, _BLOCKS, b_scales, _BLOCKS, output_dtype=torch.float32)


@fake(_wgrad_op)
def _(a, a_scales, b, b_scales):
    return torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)


@implements("cublaslt", _VERSION)
def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_fp8_matmul``: dy [M, N].T @ x [M, K], both 128x1, -> fp32 [N, K], added to ``out``.

    An ``out`` to add to, a single block of tokens, and N or K that are not multiples of 128 go to DeepGEMM.
    """
    if out is not None or dy.shape[1] % BLOCK or x.shape[1] % BLOCK or dy.shape[0] <= BLOCK:
        return deepgemm.wgrad_fp8_matmul(dy, x, out)
    check_kinds("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    check_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    return _wgrad_op(deepgemm.whole_blocks(dy), dy.scales.t(), deepgemm.whole_blocks(x), x.scales.t())


__all__ = ["wgrad_fp8_matmul"]
