"""The quantisers: THE definition of how a block of numbers becomes e4m3 codes and one scale.

For each block, everything in fp32 (bf16/fp16 inputs are widened first, which is exact):

1. ``amax`` = largest finite \\|x\\| of the block (0 if there is none);
2. ``scale`` = max(amax / 448, scale_floor), a true (correctly rounded) division;
3. ``ue8m0``: scale rounded **up** to a power of two;
4. ``code`` = e4m3(clamp(x / scale, -448, 448)), true division, rounding to nearest even.

So +-inf saturates to +-448 and does not disturb its block, NaN stays NaN and does not disturb its block, an
all-zero block has codes 0, a ragged last block behaves as if padded with zeros. A multiplication by a
reciprocal gives other codes (0.12 % of them, measured on 2026-11-29), which is why the division is part of the
definition. float64 inputs are refused: their rounding to fp32 would be a second, hidden one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from precision_kernels.declaration import define_fp8
from precision_kernels.reference.formats import (
    BLOCK,
    FP8,
    FP8_MAX,
    SCALE_FLOOR,
    SCALE_FORMATS,
    Kind,
    Quantised,
    ScaleFormat,
)

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_quantisable(name: str, x: torch.Tensor, scale_format: str, scale_floor: float) -> None:
    """Raises ValueError naming everything that keeps quantiser ``name`` from taking x [M, K] and the scale options."""
    problems = []
    if x.dim() != 2:
        problems.append(f"x must be a matrix, got shape {tuple(x.shape)} (flatten leading dimensions first)")
    if x.dtype not in INPUT_DTYPES:
        problems.append(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if scale_format not in SCALE_FORMATS:
        problems.append(f"scale_format must be one of {SCALE_FORMATS}, got {scale_format!r}")
    if not 2.0**-126 <= scale_floor < 2.0**127:
        problems.append(
            f"scale_floor must be a normal positive fp32 number (0 would divide 0 by 0), got {scale_floor!r}"
        )
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def power_of_two_ceiling(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x for fp32 x >= 2^-126, by integer arithmetic on the bits."""
    bits = x.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def block_scales(amax: torch.Tensor, scale_format: str, scale_floor: float) -> torch.Tensor:
    """Steps 2 and 3 of the definition: fp32 amax -> fp32 scale, any shape."""
    # A 0-d tensor on the same device: CUDA turns division by a Python number into a reciprocal multiply.
    scales = amax / torch.tensor(FP8_MAX, dtype=torch.float32, device=amax.device)
    scales = scales.clamp_(min=scale_floor)
    return power_of_two_ceiling(scales) if scale_format == "ue8m0" else scales


def _quantise(
    x: torch.Tensor, tile: tuple[int, int], kind: Kind, fmt: ScaleFormat, floor: float
) -> Quantised:
    rows, columns = x.shape
    high, wide = tile
    x32 = x.float()
    if rows % high or columns % wide:
        x32 = pad(x32, (0, -columns % wide, 0, -rows % high))
    tiles = x32.reshape(x32.shape[0] // high, high, x32.shape[1] // wide, wide)
    magnitude = tiles.abs()
    amax = magnitude.amax((1, 3)) if tiles.numel() else magnitude.new_zeros(tiles.shape[0], tiles.shape[2])
    if not torch.isfinite(amax).all():
        amax = torch.where(torch.isfinite(magnitude), magnitude, 0.0).amax((1, 3))
    scales = block_scales(amax, fmt, floor)
    codes = (tiles / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    codes = codes.view(x32.shape)[:rows, :columns].contiguous()
    return Quantised(codes, scales, kind, fmt)


@define_fp8
def quantise_activation(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """Quantise x [M, K] (fp32/bf16/fp16, any strides) in 1x128 blocks along K: scales [M, ceil(K/128)]."""
    check_quantisable("quantise_activation", x, scale_format, scale_floor)
    return _quantise(x, (1, BLOCK), "1x128", scale_format, scale_floor)


@define_fp8
def quantise_columns(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """Quantise x [M, K] in 128x1 blocks along M, the wgrad contraction: scales [ceil(M/128), K]."""
    check_quantisable("quantise_columns", x, scale_format, scale_floor)
    return _quantise(x, (BLOCK, 1), "128x1", scale_format, scale_floor)


@define_fp8
def quantise_both(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> tuple[Quantised, Quantised]:
    """(`quantise_activation`, `quantise_columns`) of x [M, K]; a kernel reads x once for both."""
    return quantise_activation(x, scale_format, scale_floor), quantise_columns(x, scale_format, scale_floor)


@define_fp8
def quantise_weight(
    w: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """Quantise w [N, K] in 128x128 blocks: scales [ceil(N/128), ceil(K/128)]."""
    check_quantisable("quantise_weight", w, scale_format, scale_floor)
    return _quantise(w, (BLOCK, BLOCK), "128x128", scale_format, scale_floor)


@define_fp8
def dequantise(q: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`Quantised.dequantise` as an operator, so that a device can bind a kernel."""
    return q.dequantise(dtype)


__all__ = [
    "dequantise",
    "quantise_activation",
    "quantise_both",
    "quantise_columns",
    "quantise_weight",
]
