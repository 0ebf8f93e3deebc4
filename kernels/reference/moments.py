"""How the moments of an optimiser are stored: in FP32, in BF16, or in 8 bits with a scale for each 128 elements.

An exponential average moves by (1 - beta) of its distance to the gradient. Where that is less than half a step of the
format, rounding to nearest returns the old value for ever: BF16 moments stall at beta2 = 0.99, 8-bit ones at any. The
narrow formats therefore round stochastically: up with the probability that makes the expected value exact.

========================  ======================================================================================
`float32`                 as it is
`bfloat16`                to nearest, ties to even
`bfloat16_stochastic`     16 random bits are added below the 16 kept ones, then the lower half is cut off
`blockwise_8bit`          first moment   m = sign · s · (c / 127)^2,   c int8 in -127..127
                          second moment  v = s · (c / 255)^4,          c uint8
========================  ======================================================================================

s is the largest magnitude of 128 consecutive elements in row-major order (the last block may be shorter), within
2^-92..2^126. The powers give small elements finer steps: an element at 1 % of the largest root of v has steps of 8 %
(linear codes: 40 %), and elements down to 1/65025 of it have one at all. Square root of v and m are what the update
divides, and zero is the one value that must not be met by accident there: v > 0 never gets the code 0.
(torchao's AdamW8bit and flashoptim 0.1.4 round to nearest, each with bits of its own on each device, and neither takes
FP32 gradients of BF16 parameters. Bit-equal resumption and a definition that runs anywhere are why this is our own.)

Random bits are a hash of (element, step, tensor): no generator has a state that a checkpoint could lose, and every
learner of a group rounds alike. The hash is MurmurHash3's finaliser, twice; its keys are splitmix64's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from precision_kernels.reference.formats import BLOCK

__all__ = [
    "MOMENT_FORMATS",
    "RANGE",
    "Moment",
    "MomentFormat",
    "empty_moment",
    "load_moment",
    "random_keys",
    "random_words",
    "square_root",
    "store_moment",
]

MomentFormat = Literal["float32", "bfloat16", "bfloat16_stochastic", "blockwise_8bit"]
MOMENT_FORMATS: tuple[MomentFormat, ...] = ("float32", "bfloat16", "bfloat16_stochastic", "blockwise_8bit")
RANGE = (2.0**-92, 2.0**126)
"""Of scales: below, the step of the second moment, s / 255^4, would lose bits or vanish; above, its codes overflow."""
LEVELS = {False: 127, True: 255}
"""Largest code of a first and of a second moment."""
_MASK = (1 << 32) - 1


class Moment(NamedTuple):
    """One moment of a tensor, stored: values (or codes) of the tensor's shape, and fp32 scales [ceil(n / 128)] or None.

    square: it is a second moment, none of whose values is negative.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    format: MomentFormat
    square: bool


def empty_moment(
    shape: torch.Size | tuple[int, ...],
    format: MomentFormat,
    square: bool,
    device: torch.device | str = "cpu",
) -> Moment:
    """A moment of zeros. Raises ValueError for an unknown format."""
    if format not in MOMENT_FORMATS:
        raise ValueError(f"moments: format must be one of {MOMENT_FORMATS}, got {format!r}")
    if format != "blockwise_8bit":
        dtype = torch.float32 if format == "float32" else torch.bfloat16
        return Moment(torch.zeros(shape, dtype=dtype, device=device), None, format, square)
    codes = torch.zeros(shape, dtype=torch.uint8 if square else torch.int8, device=device)
    scales = torch.zeros(-(-codes.numel() // BLOCK), dtype=torch.float32, device=device)
    return Moment(codes, scales, format, square)


def load_moment(moment: Moment) -> torch.Tensor:
    """The stored values in fp32; a new tensor, or the stored one if it is fp32."""
    if moment.scales is None:
        return moment.values.float()
    codes = _blocks(moment.values.float())
    units = (moment.scales * _unit(moment.square))[:, None]
    power = codes * codes
    values = power * power * units if moment.square else torch.where(codes < 0, -power, power) * units
    return values.reshape(-1)[: moment.values.numel()].view(moment.values.shape)


def store_moment(moment: Moment, values: torch.Tensor, words: torch.Tensor) -> None:
    """Round fp32 values into the stored ones, in place; both must be finite.

    words: `random_words` of the elements: int64, of the shape of ``values``. First moments use the lower 16 bits,
        second ones the upper 16.
    """
    bits = (words >> 16) if moment.square else words & 0xFFFF
    if moment.format == "bfloat16_stochastic":
        moment.values.copy_(_stochastic_bfloat16(values, bits))
    elif moment.scales is None:
        moment.values.copy_(values)
    else:
        codes, scales = _codes(values, bits, moment.square)
        moment.values.copy_(codes)
        moment.scales.copy_(scales)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """The IEEE fp32 square root; torch 2.13's on a CPU is off by one ulp for a fifth of all numbers."""
    return x.double().sqrt_().float()


def _stochastic_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 whose lower 16 bits are zero. What is largest may become infinite; infinities and NaN stay as they are."""
    raised = (values.contiguous().view(torch.int32) + bits.to(torch.int32)) & ~0xFFFF
    return torch.where(torch.isfinite(values), raised.view(torch.float32), values)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] of the elements in row-major order, filled up with zeros."""
    flat = values.reshape(-1)
    return pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _unit(square: bool) -> torch.Tensor:
    """fp32 1 / 127^2 or 1 / 255^4: what a scale is multiplied by for the step between the two lowest codes."""
    return torch.tensor(1.0 / LEVELS[square] ** (4 if square else 2), dtype=torch.float32)


def _codes(values: torch.Tensor, bits: torch.Tensor, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of ``values`` (int64) and scales; every operation rounds to fp32 once."""
    level, (low, high) = float(LEVELS[square]), RANGE
    x = _blocks(values)
    size = x.abs().clamp(max=high)
    scales = (size.amax(1) if len(x) else size.new_zeros(0)).clamp(min=low)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    whole = level**4 if square else level**2
    y = (size * (one / scales)[:, None]) * torch.tensor(whole, dtype=torch.float32)
    root = square_root(square_root(y)) if square else square_root(y)
    code = root.floor().clamp(max=level - 1.0)
    below, above = code * code, (code + 1.0) * (code + 1.0)
    if square:
        below, above = below * below, above * above
    chance = (_blocks(bits).float() + 0.5) * 2.0**-16
    code = code + (chance * (above - below) < y - below).float()
    code = torch.where(x > 0.0, code.clamp(min=1.0), 0.0) if square else torch.where(x < 0.0, -code, code)
    return code.to(torch.int64).reshape(-1)[: values.numel()].view(values.shape), scales


def random_keys(step: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers for one update of one tensor: splitmix64 of both."""
    z = (((step << 32) + position + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    z ^= z >> 31
    return z & _MASK, z >> 32


def _mixed(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser of 32-bit numbers in int64; products wrap modulo 2^64, of which 32 bits are kept."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def random_words(elements: int, keys: tuple[int, int], device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [elements] of 32 random bits; element i's depend on i and the keys only."""
    index = torch.arange(elements, dtype=torch.int64, device=device)
    first = _mixed((index & _MASK) ^ keys[0])
    return _mixed((first + (index >> 32) * 0x9E3779B9 + keys[1]) & _MASK)
