"""The GEMMs: block-scaled FP8 (three contractions) and a row-invariant one for bf16/fp16/fp32.

Block FP8, for output element (i, j) and contraction blocks b = 0, 1, ... of 128 in ascending order::

    acc = acc + fp32(sum over the block of code_a * code_b) * fp32(scale_a * scale_b)      (fp32, no FMA)

from the first block's term on, and one rounding of acc to the output dtype at the end. The sum over a block
is exact in fp64 (codes lie on a 2^-9 grid: products need 44 bits, `exact`), so bits do not depend on shape,
threads, library or device.
Hopper's tensor cores accumulate with fewer bits; a twin there is equal to itself, and close to this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from precision_kernels.declaration import define, define_fp8
from precision_kernels.reference.exact import align, widen
from precision_kernels.reference.formats import BLOCK, Quantised, blocks


def check_kinds(name: str, **operands: tuple[Quantised, str]) -> None:
    """Raises ValueError naming every operand that is not quantised in the blocks it must have: name=(operand, kind)."""
    wrong = [
        f"{key} must be quantised in {kind} blocks, got {q.kind}"
        for key, (q, kind) in operands.items()
        if q.kind != kind
    ]
    if wrong:
        raise ValueError(f"{name}: " + "; ".join(wrong))


_TILE_ELEMENTS = 1 << 16
"""Output elements handled at a time: their fp64 products and fp32 sums then stay in a core's second-level cache."""


def _memo(q: Quantised, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if key not in q.operands:
        q.operands[key] = make()
    return q.operands[key]


def _wide(q: Quantised) -> torch.Tensor:
    """The codes as fp64."""
    return _memo(q, "fp64", lambda: widen(q.codes))


def _row_tiles(rows: int, columns: int) -> Iterator[slice]:
    step = max(BLOCK, _TILE_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _accumulate(
    a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, fresh: bool
) -> torch.Tensor:
    """The sum of the module docstring: fp64 a [M, K], b [K, N], fp32 left [blocks, M], right [blocks, N] ->
    out [M, N].

    ``fresh``: out is uninitialised, the first block's term starts the sum; otherwise everything is added to
    it.
    """
    if a.shape[1] == 0 and fresh:
        return out.zero_()
    for rows in _row_tiles(*out.shape):
        acc = out[rows]
        for i in range(blocks(a.shape[1])):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            product = (a[rows, part] @ b[part]).float()
            scale = left[i, rows, None] * right[i]
            if fresh and i == 0:
                torch.mul(product, scale, out=acc)
            else:
                acc += product.mul_(scale)
    return out


@define_fp8
def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Forward: a [M, K] in 1x128, b [N, K] in 128x128 -> a @ b.T [M, N] in ``out_dtype``.

    Raises ValueError on block kinds or K that do not match.
    """
    check_kinds("block_fp8_matmul", a=(a, "1x128"), b=(b, "128x128"))
    check_contraction("block_fp8_matmul", "a columns", a.shape[1], "b columns", b.shape[1])
    right = _memo(b, "rows", lambda: b.scales.T.repeat_interleave(BLOCK, 1)[:, : b.shape[0]].contiguous())
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.codes.device)
    return _accumulate(_wide(a), _wide(b).T, a.scales.T, right, out, fresh=True).to(out_dtype)


@define_fp8
def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Input gradient: dy [M, N] in 1x128 (along N), w [N, K] in 128x128 -> dy @ w [M, K] in ``out_dtype``."""
    check_kinds("dgrad_fp8_matmul", dy=(dy, "1x128"), w=(w, "128x128"))
    check_contraction("dgrad_fp8_matmul", "dy columns", dy.shape[1], "w rows", w.shape[0])
    right = _memo(w, "columns", lambda: w.scales.repeat_interleave(BLOCK, 1)[:, : w.shape[1]].contiguous())
    out = torch.empty(dy.shape[0], w.shape[1], dtype=torch.float32, device=dy.codes.device)
    return _accumulate(_wide(dy), _wide(w), dy.scales.T, right, out, fresh=True).to(out_dtype)


@define_fp8
def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """Weight gradient: dy [M, N] and x [M, K], both in 128x1 (along M) -> dy.T @ x fp32 [N, K].

    With ``out`` (fp32 [N, K]) the product is added to it in place, block by block: main-gradient
    accumulation.
    """
    check_kinds("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    check_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    fresh = out is None
    if out is None:
        out = torch.empty(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.codes.device)
    return _accumulate(_wide(dy).T, _wide(x), dy.scales, x.scales, out, fresh)


def check_contraction(name: str, left: str, a: int, right: str, b: int) -> None:
    """Raises ValueError unless the summed axes, named ``left`` and ``right``, are of one length a == b."""
    if a != b:
        raise ValueError(f"{name}: {left} ({a}) and {right} ({b}) must be equal, the product sums over them")


class AlignedWeight:
    """A bf16/fp16/fp32 weight [N, K] with its fp64 `align`-ed copy, for repeated `invariant_matmul` calls."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach()
        self.aligned = align(self.weight)

    @property
    def shape(self) -> torch.Size:
        """Shape [N, K]."""
        return self.weight.shape


@define
def pack_weight(w: torch.Tensor) -> AlignedWeight:
    """What `invariant_matmul` wants to keep of a weight [N, K] that is used more than once."""
    return AlignedWeight(w)


@define
def invariant_matmul(
    x: torch.Tensor, w: torch.Tensor | AlignedWeight, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Row-invariant x [M, K] @ w [N, K].T -> [M, N] for bf16/fp16/fp32 operands (lm_head, exempt linears).

    Both operands are rounded to 23-bit grids per row and 128-block of K (`exact.align`; no change at all for
    bf16 elements within 2^-16 of their block's largest), block products are exact, blocks add up in fp64 in
    ascending order, and the sum is rounded to fp32 and then to ``out_dtype`` (default: x's dtype).
    """
    if x.dim() != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"invariant_matmul: x [M, K] and w [N, K] are needed, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if x.dtype == torch.float64:
        raise ValueError(
            "invariant_matmul: x must be float32, bfloat16 or float16, got float64 (23 bits would be kept)"
        )
    aligned = w.aligned if isinstance(w, AlignedWeight) else align(w)
    out = torch.empty(x.shape[0], w.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    for rows in _row_tiles(*out.shape):
        wide = align(x[rows])
        acc = wide[:, :BLOCK] @ aligned[:, :BLOCK].T
        for start in range(BLOCK, x.shape[1], BLOCK):
            acc += wide[:, start : start + BLOCK] @ aligned[:, start : start + BLOCK].T
        out[rows] = acc.float().to(out.dtype)
    return out


@define
def dgrad_matmul(dy: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dy [M, N] @ w [N, K] -> [M, K] for operands of one dtype: the library's GEMM, deterministic but not
    row-invariant.
    """
    if out_dtype == dy.dtype:
        return dy @ w
    return (dy.float() @ w.float()).to(out_dtype)


@define
def wgrad_matmul(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """dy [M, N].T @ x [M, K] -> fp32 [N, K]; operands widened exactly, fp32 accumulation, deterministic.

    With ``out`` (fp32 [N, K]) the product is added to it in place.
    """
    if out is not None:
        return out.addmm_(dy.float().T, x.float())
    return dy.float().T @ x.float()


__all__ = [
    "AlignedWeight",
    "block_fp8_matmul",
    "dgrad_fp8_matmul",
    "dgrad_matmul",
    "invariant_matmul",
    "pack_weight",
    "wgrad_fp8_matmul",
    "wgrad_matmul",
]
