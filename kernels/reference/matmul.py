"""The GEMMs: block-scaled FP8 (three contractions) and a row-invariant one for bf16/fp16/fp32.

Block FP8, for output element (i, j) and contraction blocks b = 0, 1, ... of 128 in ascending order::

    acc = acc + fp32(sum over the block of code_a * code_b) * fp32(scale_a * scale_b)        (fp32, separate
    roundings)

and one rounding of acc to the output dtype at the end. The sum over a block is exact in fp64 (codes lie on a
2^-9 grid: products need 44 bits, `exact`), so bits do not depend on shape, threads, library or device.
Hopper's tensor cores accumulate with fewer bits; a twin there is equal to itself, and close to this.
"""

from __future__ import annotations

import torch

from precision_kernels.reference.exact import align
from precision_kernels.reference.formats import BLOCK, Quantised, blocks


def _expect(name: str, **operands: tuple[Quantised, str]) -> None:
    wrong = [
        f"{key} must be quantised in {kind} blocks, got {q.kind}"
        for key, (q, kind) in operands.items()
        if q.kind != kind
    ]
    if wrong:
        raise ValueError(f"{name}: " + "; ".join(wrong))


def _wide(q: Quantised) -> torch.Tensor:
    """The codes as fp64, memoised on weights only (they are used again; activations are not)."""
    if q.kind != "128x128":
        return q.codes.double()
    if "fp64" not in q.operands:
        q.operands["fp64"] = q.codes.double()
    return q.operands["fp64"]


def _accumulate(a: torch.Tensor, b: torch.Tensor, scales, out: torch.Tensor) -> torch.Tensor:
    """out += sum over 128-blocks of (a[:, block] @ b[block, :]) * scales(block); a [M, K], b [K, N] fp64."""
    for index in range(blocks(a.shape[1])):
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        product = (a[:, part] @ b[part]).float()
        out += product.mul_(scales(index))
    return out


def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Forward: a [M, K] in 1x128, b [N, K] in 128x128 -> a @ b.T [M, N] in ``out_dtype``.

    Raises ValueError on block kinds or K that do not match.
    """
    _expect("block_fp8_matmul", a=(a, "1x128"), b=(b, "128x128"))
    _same_contraction("block_fp8_matmul", "a columns", a.shape[1], "b columns", b.shape[1])
    n = b.shape[0]
    rows = b.scales.repeat_interleave(BLOCK, 0)[:n]
    out = torch.zeros(a.shape[0], n, dtype=torch.float32, device=a.codes.device)
    _accumulate(_wide(a), _wide(b).T, lambda i: a.scales[:, i, None] * rows[None, :, i], out)
    return out.to(out_dtype)


def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Input gradient: dy [M, N] in 1x128 (along N), w [N, K] in 128x128 -> dy @ w [M, K] in ``out_dtype``."""
    _expect("dgrad_fp8_matmul", dy=(dy, "1x128"), w=(w, "128x128"))
    _same_contraction("dgrad_fp8_matmul", "dy columns", dy.shape[1], "w rows", w.shape[0])
    k = w.shape[1]
    columns = w.scales.repeat_interleave(BLOCK, 1)[:, :k]
    out = torch.zeros(dy.shape[0], k, dtype=torch.float32, device=dy.codes.device)
    _accumulate(_wide(dy), _wide(w), lambda i: dy.scales[:, i, None] * columns[None, i], out)
    return out.to(out_dtype)


def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """Weight gradient: dy [M, N] and x [M, K], both in 128x1 (along M) -> dy.T @ x fp32 [N, K].

    With ``out`` (fp32 [N, K]) the product is added to it in place, block by block: main-gradient
    accumulation.
    """
    _expect("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    _same_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    if out is None:
        out = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.codes.device)
    return _accumulate(_wide(dy).T, _wide(x), lambda i: dy.scales[i, :, None] * x.scales[None, i], out)


def _same_contraction(name: str, left: str, a: int, right: str, b: int) -> None:
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


def pack_weight(w: torch.Tensor) -> AlignedWeight:
    """What `invariant_matmul` wants to keep of a weight [N, K] that is used more than once."""
    return AlignedWeight(w)


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
    aligned = w.aligned if isinstance(w, AlignedWeight) else align(w)
    wide = align(x)
    acc = wide[:, :BLOCK] @ aligned[:, :BLOCK].T
    for start in range(BLOCK, x.shape[1], BLOCK):
        acc += wide[:, start : start + BLOCK] @ aligned[:, start : start + BLOCK].T
    return acc.float().to(out_dtype or x.dtype)


def dgrad_matmul(dy: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dy [M, N] @ w [N, K] -> [M, K] for operands of one dtype: the library's GEMM, deterministic but not
    row-invariant.
    """
    if out_dtype == dy.dtype:
        return dy @ w
    return (dy.float() @ w.float()).to(out_dtype)


def wgrad_matmul(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy [M, N].T @ x [M, K] -> fp32 [N, K]; operands widened exactly, fp32 accumulation, deterministic."""
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
