"""base + scale * product of :mod:`precision_kernels.reference.low_rank`, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.low_rank import check_add_scaled
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, as_matrix, cdiv
from precision_kernels.triton.numerics import round_to, widen

_ROWS, _COLUMNS = 8, 256
"""The tile of `triton.activation`, which reads as many matrices and writes as many; not measured for this kernel."""


@triton.jit
def _add_scaled_kernel(
    base, product, y, M, N, base_m, product_m, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    b = tl.load(base + rows[:, None] * base_m + columns[None, :], mask, 0.0)
    z = tl.load(product + rows[:, None] * product_m + columns[None, :], mask, 0.0)
    # Two roundings to fp32 (nothing is contracted, see `numerics`), then one to base's dtype.
    total = widen(b) + z * scale
    tl.store(y + rows[:, None] * N + columns[None, :], round_to(total, y.dtype.element_ty), mask)


@operator("add_scaled")
def add_scaled_op(base: torch.Tensor, product: torch.Tensor, scale: float) -> torch.Tensor:
    """base [M, N] + scale * product fp32 [M, N], in base's dtype; rows of both are contiguous."""
    m, n = base.shape
    y = torch.empty(m, n, dtype=base.dtype, device=base.device)
    if m and n:
        _add_scaled_kernel[(cdiv(m, _ROWS), cdiv(n, _COLUMNS))](
            base, product, y, m, n, base.stride(0), product.stride(0), scale, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@fake(add_scaled_op)
def _(base, product, scale):
    return torch.empty(base.shape[0], base.shape[1], dtype=base.dtype, device=base.device)


@implements("triton", VERSION)
def add_scaled(base: torch.Tensor, product: torch.Tensor, scale: float) -> torch.Tensor:
    """``reference.low_rank.add_scaled``; column slices of one product are read in place."""
    check_add_scaled(base, product)
    return add_scaled_op(as_matrix(base), as_matrix(product), float(scale)).view(base.shape)


__all__ = ["add_scaled"]
