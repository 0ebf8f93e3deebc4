"""Sizes of grids and tiles, on the host.

`triton.cdiv` and `triton.next_power_of_2` serve kernels too, and find out at each call who is calling: that takes 3 us,
as long as an operator's whole dispatch.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


__all__ = ["cdiv", "next_power_of_2"]
