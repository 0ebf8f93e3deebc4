"""The sum at the end of a linear with a low-rank adapter (LoRA, arXiv 2106.09685): base + scale * B (A x).

The two products are `matmul.invariant_matmul`: a row's bits depend on nothing but the row. So do those of this sum.
"""

from __future__ import annotations

import torch

from precision_kernels.declaration import define


def check_add_scaled(base: torch.Tensor, product: torch.Tensor) -> None:
    """Raises ValueError for a product of another shape or dtype than `add_scaled` takes."""
    if product.dtype != torch.float32 or product.shape != base.shape or base.dim() != 2:
        raise ValueError(
            f"add_scaled: base [M, N] and an fp32 product [M, N] are needed, got {list(base.shape)} and "
            f"{product.dtype} {list(product.shape)}"
        )


@define
def add_scaled(base: torch.Tensor, product: torch.Tensor, scale: float) -> torch.Tensor:
    """base [M, N] in any float dtype, product fp32 [M, N] -> base + scale * product in base's dtype.

    In fp32, scale rounded to fp32: the product with scale is rounded, then the sum, then the result to base's dtype.
    Raises ValueError for another shape or dtype of product.
    """
    check_add_scaled(base, product)
    return (base.float() + product * scale).to(base.dtype)


__all__ = ["add_scaled"]
