"""How kernels are made and launched, on the host.

`triton.cdiv` and `triton.next_power_of_2` serve kernels too, and find out at each call who is calling: that takes 3 us,
as long as an operator's whole dispatch.
"""

from __future__ import annotations

import torch
import triton

VERSION = f"triton-{triton.__version__}"
"""What of the installed software decides a Triton kernel's bits."""

jit_any_rows = triton.jit(do_not_specialize=("M", "N"))
"""`triton.jit` for kernels whose results mix rows of a matrix of M (a weight: N) rows. For M = 1 Triton would compile M
in, and ptxas leaves registers of a load undefined whose mask then is false at compile time: instead of zeros beyond
the row, 128x1 codes had whatever was there, NaN among it (2026-11-30, one H200, CUDA 13.0, triton 3.6, torch 2.11).
"""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [M, D] with contiguous rows, without a copy where strides allow it."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


__all__ = ["VERSION", "as_matrix", "cdiv", "jit_any_rows", "next_power_of_2"]
