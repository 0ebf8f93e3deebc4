"""The GEMMs of a backward in bf16, fp16 or fp32, by the library that torch calls: cuBLAS."""

from __future__ import annotations

import torch

from precision_kernels.declaration import implements

_VERSION = f"torch-{torch.__version__}"


@implements("cublas", _VERSION)
def dgrad_matmul(dy: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``reference.matmul.dgrad_matmul`` through cuBLAS: dy [M, N] @ w [N, K] -> [M, K], fp32 accumulation."""
    return dy @ w if out_dtype == dy.dtype else torch.mm(dy, w, out_dtype=out_dtype)


@implements("cublas", _VERSION)
def wgrad_matmul(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_matmul`` through cuBLAS: dy [M, N].T @ x [M, K] -> fp32 [N, K], added to ``out``."""
    if out is not None and dy.dtype == torch.float32:
        return out.addmm_(dy.t(), x)
    if out is not None:
        return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)
    return dy.t() @ x if dy.dtype == torch.float32 else torch.mm(dy.t(), x, out_dtype=torch.float32)


__all__ = ["dgrad_matmul", "wgrad_matmul"]
