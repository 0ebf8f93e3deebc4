"""FP32 numbers held in two parts, the first of which is the BF16 number that operators read.

    high = bf16(w), to nearest, ties to even      low = bits(w) - bits(high) · 2^16

as 32-bit integers, so that ``bits(w) = bits(high) · 2^16 + low``. An optimiser updates w, everything else reads `high`
where it lies: no rounded copy is made, and no rounding can differ from that of the FP32 master.

`low` takes 16 bits and, for one value in 2^16, one bit more. An even BF16 number is what 65 537 FP32 numbers round to
(both ties go to it, low = -32768 and +32768), an odd one what 65 535 do: no 16 bits can tell 65 537 apart. So +32768
is written as -32768 with a bit set in `ties`, an eighth of a byte for each number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["LowHalf", "empty_low_half", "join_float32", "split_float32", "tie_bytes"]

_TIE = 1 << 15


class LowHalf(NamedTuple):
    """What a BF16 tensor of n elements lacks of the FP32 one that it is the rounding of.

    low: int16, of the tensor's shape. ties: uint8 [ceil(n / 8)]; bit i % 8 of byte i // 8 belongs to element i.
    """

    low: torch.Tensor
    ties: torch.Tensor


def tie_bytes(elements: int) -> int:
    """Bytes of `LowHalf.ties` for so many elements."""
    return -(-elements // 8)


def empty_low_half(shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> LowHalf:
    """That of a tensor of BF16 numbers: zeros."""
    low = torch.zeros(shape, dtype=torch.int16, device=device)
    return LowHalf(low, torch.zeros(tie_bytes(low.numel()), dtype=torch.uint8, device=device))


def split_float32(values: torch.Tensor) -> tuple[torch.Tensor, LowHalf]:
    """fp32 of any shape -> (``values.to(bfloat16)``, the rest); exact for everything but the payload of a NaN.

    Raises ValueError for another dtype.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"split_float32: values must be float32, got {values.dtype}")
    values = values.contiguous()
    high = values.to(torch.bfloat16)
    rest = values.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16)
    rest = torch.where(values.isnan(), 0, rest)
    tie = rest == _TIE
    return high, LowHalf(torch.where(tie, -_TIE, rest).to(torch.int16), _packed(tie))


def join_float32(high: torch.Tensor, low_half: LowHalf) -> torch.Tensor:
    """Inverse of `split_float32`: fp32 of the shape of ``high`` (bf16)."""
    rest = low_half.low.to(torch.int32)
    rest = torch.where(_unpacked(low_half.ties, rest.numel()).view(rest.shape) & (rest == -_TIE), _TIE, rest)
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + rest
    return bits.view(torch.float32)


def _packed(flags: torch.Tensor) -> torch.Tensor:
    flat = flags.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def _unpacked(ties: torch.Tensor, count: int) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=ties.device)
    return ((ties[:, None] >> shifts) & 1).view(-1)[:count].bool()
