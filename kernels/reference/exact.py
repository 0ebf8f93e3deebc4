"""Arithmetic whose bits cannot depend on batch, padding, threads or library: the tools of the reference.

Three ideas, each an argument rather than a hope:

* **Exact dot products** (`align`). A sum of 128 products of integers below 2^23 stays below 2^53, so an fp64
  GEMM over one 128-block commits no rounding at all, whatever order, FMA or blocking the library uses. e4m3
  codes are such integers (times 2^-9). Other operands are first rounded to a 23-bit grid relative to the
  largest element of their own 128-block: an error of at most 2^-24 * 2^ceil(log2 amax), fp32's own size.
* **A fixed tree** (`lane_sum`). Elements 2048 apart are added in ascending order, then neighbours, and neighbours of
  these sums, until one is left. Only elementwise additions, so vector width and threads cannot matter, and
  zeros appended at the end change nothing. The order is a GPU's: a thread adds what it has loaded in its own
  registers, then lanes of a warp meet, then warps, each with one number (`kernels/triton/numerics.py`). Folding by
  halves would move every number that a thread holds through each level, which ties a row to one warp: through shared
  memory it is three times slower.
* **exp and log from IEEE additions and multiplications** (no FMA, no table, no library call). A library promises
  neither its bits across versions, processors and tails of vectors (torch 2.13's fp32 sqrt on CPU is off by one ulp
  for one value in five), nor could a GPU kernel reproduce them; this can be copied operation by operation.

Measured with torch 2.13 on a Zen 5: an fp64 GEMM without alignment gave other bits for every one of 300 rows alone
than in a batch; torch.sum changed 226 of 300 rows of 77 when the matrix was transposed in memory, 150 when padded.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from precision_kernels.reference.formats import BLOCK, blocks

GRID_BITS = 23
"""Operands are integers of magnitude <= 2^23 after `align`: 128 * 2^23 * 2^23 = 2^53, still exact in fp64."""


def _rounder(exponent: torch.Tensor) -> torch.Tensor:
    """fp64 c = 1.5 * 2^(exponent + 52 - GRID_BITS): (x + c) - c rounds x to the grid 2^(exponent - GRID_BITS).

    ``exponent`` is an int64 tensor; |x| <= 2^exponent must hold, so x + c stays in c's binade.
    """
    return (((exponent + (52 - GRID_BITS + 1023)) << 52) | (1 << 51)).view(torch.float64)


def exponent_ceiling(amax: torch.Tensor) -> torch.Tensor:
    """int64 e with amax <= 2^e (smallest such e >= -126) for fp32 amax >= 0; 128 for inf; arbitrary for NaN."""
    bits = amax.view(torch.int32).to(torch.int64)
    return ((bits + 0x007FFFFF) >> 23) - 127


def align(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] (fp32/bf16/fp16) to its 23-bit block grids, as fp64 [..., K].

    Blocks are 128 along the last dimension. Idempotent, and the result is representable in the input dtype.
    inf and NaN pass through unchanged and make the rest of their block 0 or NaN (a GEMM then follows IEEE
    rules, which need no order).
    """
    k = x.shape[-1]
    if k == 0:
        return x.double()
    if k > BLOCK and k % BLOCK:
        return align(pad(x, (0, -k % BLOCK)))[..., :k].contiguous()
    tiles = x.reshape(*x.shape[:-1], blocks(k), min(k, BLOCK)).float()
    c = _rounder(exponent_ceiling(tiles.abs().amax(-1, keepdim=True)))
    return tiles.double().add_(c).sub_(c).view(x.shape)


def widen(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes -> fp64, exactly as ``codes.double()`` but six times faster on CPU (0.5 instead of 3 ns each).

    The seven low bits of e4m3, shifted by seven, are an fp16 number 2^8 too small; its conversion to fp32 is
    exact for subnormals too and, unlike arithmetic on fp32 subnormals, ignores the flush-to-zero mode.
    """
    if codes.device.type != "cpu" or codes.numel() == 0:
        return codes.double()
    octets = codes.view(torch.int8)
    if int((octets & 0x7F).max()) == 0x7F:
        return codes.double()
    shifted = octets.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return shifted.view(torch.float16).float().mul_(256.0).double()


SUM_LANES = 2048
"""Distance of the elements that `lane_sum` adds first: 16 elements for each thread of four warps."""


def lane_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in the fixed order of the module docstring; x [..., K] -> [...], x's dtype."""
    k = x.shape[-1]
    if k == 0:
        return x.new_zeros(x.shape[:-1])
    lanes = x[..., :SUM_LANES]
    if k > SUM_LANES:
        lanes = lanes.clone()
        for start in range(SUM_LANES, k, SUM_LANES):
            piece = x[..., start : start + SUM_LANES]
            lanes += pad(piece, (0, SUM_LANES - piece.shape[-1])) if piece.shape[-1] < SUM_LANES else piece
    return fold_lanes(lanes)


def fold_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [...]: zero-pad to a power of two, then add neighbours (2i and 2i + 1) until one is left."""
    n = lanes.shape[-1]
    if n & (n - 1):
        lanes = pad(lanes, (0, (1 << (n - 1).bit_length()) - n))
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.1219444005469057e-4
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


_EXP_CHUNK = 1 << 15
"""Elements handled at a time: the temporaries then stay in a core's second-level cache."""


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for fp32 x, from separate fp32 multiplies and adds in a fixed order (a twin must disable FMA fusion).

    x is clamped to [-88, 89]; k = rint(x * log2e); r = (x - k*0.693359375) - k*(-2.12194440e-4); p = Horner
    over the six coefficients above in r; y = (p*r*r + r) + 1; result y * 2^k, with 2^-127 read as 0 and
    2^128 as inf.
    Within 2 ulp of e^x for -87.3 < x < 88.37, 0 or subnormal below, inf above; NaN stays NaN. Coefficients:
    the classic minimax set of Cephes' expf (S. Moshier).
    """
    out = torch.clamp(x, -88.0, 89.0).contiguous()
    for chunk in out.view(-1).split(_EXP_CHUNK) if out.numel() else ():
        _exp_chunk(chunk)
    return out


def _exp_chunk(r: torch.Tensor) -> None:
    """`exp` of a clamped vector, in place."""
    k = (r * _LOG2E).round_()
    product = k * _LN2_HIGH
    r.sub_(product)
    r.sub_(torch.mul(k, _LN2_LOW, out=product))
    p = torch.mul(r, _EXP_COEFFICIENTS[0], out=product)
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p.add_(coefficient).mul_(r)
    p.mul_(r).add_(r).add_(1.0)
    power = k.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    torch.mul(p, power, out=r)


_LOG_COEFFICIENTS = tuple(2.0 / (2 * i + 1) for i in range(11, -1, -1))


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of fp32 x > 0 (normal numbers), computed in fp64 and rounded once to fp32.

    x = 2^e * m with m in [0.75, 1.5); s = (m - 1) / (m + 1); log m = s * P(s^2), P = sum of 2/(2i+1) s^(2i)
    for i = 11..0 by Horner; result e*ln2 + log m. |s| <= 1/5, so the series' rest is below 1e-18. Meant for
    one value per row (a log-sum-exp), hence fp64. 0 gives about -88, it is never called there.
    """
    bits = x.view(torch.int32)
    e = ((bits - 0x3F400000) >> 23).to(torch.int32)
    m = (bits - (e << 23)).view(torch.float32).double()
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = torch.full_like(z, _LOG_COEFFICIENTS[0])
    for coefficient in _LOG_COEFFICIENTS[1:]:
        p = p.mul_(z).add_(coefficient)
    return (e.double() * math.log(2.0)).add_(p.mul_(s)).float()


__all__ = [
    "GRID_BITS",
    "SUM_LANES",
    "align",
    "blocks",
    "exp",
    "exponent_ceiling",
    "fold_lanes",
    "lane_sum",
    "log",
    "widen",
]
