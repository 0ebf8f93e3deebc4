"""Backward of packed causal attention on Hopper, from the forward's output and log-sum-exp.

Two launches. One takes tiles of queries through the keys that they see: dq, and per row what the other needs. The other
takes tiles of keys through the queries of all heads of their group: dk and dv, summed over the group in fp32. S and dP
are computed in both, seven products where FlashAttention has five; in return every gradient is summed in registers,
in one order, and written once: no atomics, no fp32 copies of dq, dk and dv in memory, the same bits in every run.
P and dS are rounded to the inputs' dtype, as in FlashAttention.

Tiles start at a sequence's first token, and no row of a neighbour counts: a sequence has the bits that it has alone.

Where Triton is of a version that `hopper_attention` was tested with, the second launch on a GPU is that kernel.
"""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.registration import fake, operator

_LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """Rows that a program keeps, rows that it takes at a time, how many of those are under way, and warps."""

    kept: int
    step: int
    stages: int
    warps: int


_PADDED = 128
"""Rows to a multiple of which a sequence's per-row numbers are padded: those of a tile of queries."""
QUERIES = {64: Tiling(128, 64, 3, 8), 128: Tiling(128, 64, 3, 8)}
"""Tiling of the launch for dq by head dimension, the fastest on an H200 (`benchmarks/results/NOTES.md`)."""
KEYS = {64: Tiling(128, 64, 3, 8), 128: Tiling(64, 32, 3, 4)}
"""Tiling of the launch for dk and dv."""
GLUON = ("3.6.",)
"""Versions of Triton whose experimental language `hopper_attention` was tested with."""


@triton.jit
def _matrix(base, rows, stride, length, D: tl.constexpr, EDGE: tl.constexpr):
    """Rows of one head [rows, D]; at an EDGE those behind the sequence are zeros."""
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(rows < length)[:, None], other=0.0) if EDGE else tl.load(at)


@triton.jit
def _store(base, x, rows, stride, length, D: tl.constexpr):
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def _tile(tiles):
    entry = tiles + tl.program_id(1) * 4
    return tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _add_keys(
    dq, q, do, lse, delta, rows, k, v, k_t, v_t, first, length, scale, D: tl.constexpr, STEP: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    # STEP keys and values, brought to shared memory by the pipeline of the loop that calls; q, do and dq stay in
    # registers or shared memory for the whole loop.
    keys = first + tl.arange(0, STEP)
    k_rows = _matrix(k, keys, k_t, length, D, EDGE)
    v_rows = _matrix(v, keys, v_t, length, D, EDGE)
    # Products 1 and 2, [queries, keys] in fp32 registers: S = Q K^T and dP = dO V^T.
    s = tl.dot(q, tl.trans(k_rows), input_precision="ieee")
    dp = tl.dot(do, tl.trans(v_rows), input_precision="ieee")
    # P from the saved log-sum-exp: no maximum, no second pass. 2^x with log2(e) in the scale is one instruction.
    p = tl.exp2(s * scale - lse[:, None])
    # On the diagonal a query sees keys up to its own; before it every key counts, and the comparison is left out.
    if EDGE:
        p = tl.where(keys[None, :] <= rows[:, None], p, 0.0)
    # Product 3: dS, rounded to the operands' dtype, times K is added to dq in fp32.
    return tl.dot((p * (dp - delta[:, None])).to(q.dtype), k_rows, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "P"])
def _queries_kernel(
    q, k, v, do, o, lse, per_row, dq, tiles, scale, T, P, q_t, k_t, v_t, do_t, o_t, dq_t, GROUP,
    D: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program per query head and tile of 128 queries, tiles in order of their work (`tile_table`).
    head = tl.program_id(0)
    start, length, first, base = _tile(tiles)
    rows = first + tl.arange(0, KEPT)
    real = rows < length
    # q and dO of the tile are loaded once. Rows behind the sequence are zeros: their gradients are zeros and not
    # stored.
    q_rows = _matrix(q + start * q_t + head * D, rows, q_t, length, D, True)
    do_rows = _matrix(do + start * do_t + head * D, rows, do_t, length, D, True)
    o_rows = _matrix(o + start * o_t + head * D, rows, o_t, length, D, True)
    # delta = rowsum(dO * O), once per row; with lse (in powers of two) it is also what `_keys_kernel` needs of a
    # row, so both are stored. A row behind the sequence gets lse = +inf, so that its P is 0 there.
    delta = tl.sum(o_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    lse_rows = tl.load(lse + head.to(tl.int64) * T + start + rows, mask=real, other=float("inf")) * _LOG2E
    at = per_row + 2 * head.to(tl.int64) * P + base + rows
    tl.store(at, lse_rows, mask=first < length)
    tl.store(at + P, delta, mask=first < length)
    # Keys and values of the group: GROUP query heads read one head of them.
    k += start * k_t + head // GROUP * D
    v += start * v_t + head // GROUP * D
    c = scale * _LOG2E
    acc = tl.zeros((KEPT, D), tl.float32)
    # Keys before the tile: whole steps without a mask (unmasked whole steps: 322 to 354 TFLOPS on an H200).
    for j in tl.range(0, first, STEP, num_stages=STAGES):
        acc = _add_keys(
            acc, q_rows, do_rows, lse_rows, delta, rows, k, v, k_t, v_t, j, length, c, D, STEP, False
        )
    # Keys of the tile itself: the diagonal, cut at the sequence's end.
    for j in tl.range(first, tl.minimum(first + KEPT, length), STEP, num_stages=STAGES):
        acc = _add_keys(
            acc, q_rows, do_rows, lse_rows, delta, rows, k, v, k_t, v_t, j, length, c, D, STEP, True
        )
    # dq is written once, by the one program that sums it: no atomics, the same bits in every run.
    _store(dq + start * dq_t + head * D, acc * scale, rows, dq_t, length, D)


@triton.jit
def _add_queries(
    dk, dv, k, v, q, do, q_all, do_all, per_row, q_t, do_t, P, head, start, row, keys, length, scale,
    D: tl.constexpr, STEP: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    # Per-row numbers of the step come by plain loads; padded rows have lse = +inf.
    rows = row + tl.arange(0, STEP)
    at = per_row + 2 * head.to(tl.int64) * P + rows
    lse = tl.load(at)
    delta = tl.load(at + P)
    # Whole steps are copied in bulk by descriptors (TMA), as no thread has to compute addresses then; a step that
    # the sequence's end cuts is loaded with a mask, so that no neighbour's NaN gets in.
    if EDGE:
        q_rows = _matrix(q + head * D, rows, q_t, length, D, True)
        do_rows = _matrix(do + head * D, rows, do_t, length, D, True)
    else:
        q_rows = q_all.load([start.to(tl.int32) + row, head * D])
        do_rows = do_all.load([start.to(tl.int32) + row, head * D])
    # Products 1 and 2, transposed: [keys, queries] in fp32 registers, so that P and dS are left operands below.
    s = tl.dot(k, tl.trans(q_rows), input_precision="ieee")
    dp = tl.dot(v, tl.trans(do_rows), input_precision="ieee")
    p = tl.exp2(s * scale - lse[None, :])
    if EDGE:
        p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
    # Products 3 and 4: dv += P^T dO and dk += dS^T Q, accumulated in fp32 registers.
    dv = tl.dot(p.to(v.dtype), do_rows, dv, input_precision="ieee")
    dk = tl.dot((p * (dp - delta[None, :])).to(k.dtype), q_rows, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["P"])
def _keys_kernel(
    q, k, v, do, q_all, do_all, per_row, dk, dv, tiles, scale, P, q_t, k_t, v_t, do_t, dk_t, GROUP,
    D: tl.constexpr, KEPT: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program per key head and tile of 64 or 128 keys. It takes the queries of all heads of its group, so that dk
    # and dv are summed over the group in registers and rounded once.
    kv = tl.program_id(0)
    start, length, first, base = _tile(tiles)
    keys = first + tl.arange(0, KEPT)
    # Keys and values of the tile are loaded once and stay; dk_sum and dv_sum are fp32 accumulators in registers.
    k_rows = _matrix(k + start * k_t + kv * D, keys, k_t, length, D, True)
    v_rows = _matrix(v + start * v_t + kv * D, keys, v_t, length, D, True)
    dk_sum = tl.zeros((KEPT, D), tl.float32)
    dv_sum = tl.zeros((KEPT, D), tl.float32)
    q += start * q_t
    do += start * do_t
    per_row += base
    c = scale * _LOG2E
    # First the steps that see a part of the keys and the one that the sequence's end cuts, then all others. A loop is
    # begun before its condition is known, so a division by no steps would be undefined, and the loop with it.
    near = tl.cdiv(tl.minimum(length - first, KEPT), STEP)
    rest = tl.maximum(length - first - KEPT, 0)
    whole = rest // STEP
    edges = near + (rest % STEP != 0).to(tl.int32)
    # Steps with a mask, of all heads of the group one after the other: one loop, so that its pipeline is filled
    # once.
    for i in tl.range(0, GROUP * edges, num_stages=STAGES):
        h = i // tl.maximum(edges, 1)
        step = i - h * edges
        row = first + tl.where(step < near, step * STEP, KEPT + whole * STEP)
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_rows, v_rows, q, do, q_all, do_all, per_row, q_t, do_t, P, kv * GROUP + h, start, row,
            keys, length, c, D, STEP, True,
        )  # fmt: skip
    # All other steps, without a mask.
    for i in tl.range(0, GROUP * whole, num_stages=STAGES):
        h = i // tl.maximum(whole, 1)
        row = first + KEPT + (i - h * whole) * STEP
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_rows, v_rows, q, do, q_all, do_all, per_row, q_t, do_t, P, kv * GROUP + h, start, row,
            keys, length, c, D, STEP, False,
        )  # fmt: skip
    # Each gradient is written once.
    _store(dk + start * dk_t + kv * D, dk_sum * scale, keys, dk_t, length, D)
    _store(dv + start * dk_t + kv * D, dv_sum, keys, dk_t, length, D)


def _rows_of(x: torch.Tensor, step: int) -> TensorDescriptor:
    """x [T, H, D] as a matrix [T, H * D] that is copied by ``step`` rows of one head."""
    tokens, heads, dim = x.shape
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [step, dim])


@functools.cache
def _hopper(device: torch.device) -> types.ModuleType | None:
    """`hopper_attention`, if it is for this device and this Triton."""
    if device.type != "cuda" or not triton.__version__.startswith(GLUON):
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    from precision_kernels.triton import hopper_attention

    return hopper_attention


@operator("attention_backward")
def _backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    query_tiles: torch.Tensor, key_tiles: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) of rows of whole heads; lse fp32 [H, T] contiguous; tiles of `tile_table`."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    padded = len(query_tiles) * _PADDED
    per_row = torch.empty(heads, 2, padded, dtype=torch.float32, device=q.device)
    kept, step, stages, warps = QUERIES[dim]
    _queries_kernel[(heads, len(query_tiles))](
        q, k, v, do, o, lse, per_row, dq, query_tiles, scale, tokens, padded, q.stride(0), k.stride(0),
        v.stride(0), do.stride(0), o.stride(0), dq.stride(0), heads // kv_heads, D=dim, KEPT=kept, STEP=step,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    hopper = _hopper(q.device)
    if hopper:
        hopper.launch(q, k, v, do, per_row, dk, dv, key_tiles, scale)
        return dq, dk, dv
    kept, step, stages, warps = KEYS[dim]
    _keys_kernel[(kv_heads, len(key_tiles))](
        q, k, v, do, _rows_of(q, step), _rows_of(do, step), per_row, dk, dv, key_tiles, scale, padded, q.stride(0),
        k.stride(0), v.stride(0), do.stride(0), dk.stride(0), heads // kv_heads, D=dim, KEPT=kept, STEP=step,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dq, dk, dv


@fake(_backward_op)
def _(do, q, k, v, o, lse, query_tiles, key_tiles, scale):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def tile_table(cu_seqlens: torch.Tensor, tokens: int, rows: int, seen: bool) -> torch.Tensor:
    """Tiles of ``rows`` rows of packed sequences, int32 [tokens // rows + B, 4]: first token of the sequence, its
    length, first row of the tile in it, first row of the sequence where each is padded to whole tiles of 128.

    Most work first: by rows that a tile's queries see (``seen``), or by rows that see its keys. How many tiles there
    are stays on the device; the last ones have length 0.
    """
    lengths = cu_seqlens.diff()
    count = (lengths + (rows - 1)) // rows
    ends = count.cumsum(0)
    tile = torch.arange(tokens // rows + len(lengths), device=lengths.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    used = sequence < len(lengths)
    sequence = sequence.clamp(max=len(lengths) - 1)
    first = torch.where(used, (tile - (ends - count)[sequence]) * rows, 0)
    length = torch.where(used, lengths[sequence], 0)
    work = torch.where(used, first if seen else length - first, -1)
    order = work.argsort(descending=True, stable=True)
    padded = (lengths + (_PADDED - 1)) // _PADDED * _PADDED
    base = (padded.cumsum(0) - padded)[sequence]
    return torch.stack((cu_seqlens[:-1][sequence], length, first, base), 1)[order].to(torch.int32)


def _tables(layout: AttentionLayout, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = ("attention backward", dim)
    if key not in layout.memo:
        queries = tile_table(layout.cu_seqlens, tokens, QUERIES[dim].kept, seen=True)
        hopper = _hopper(layout.cu_seqlens.device)
        kept = hopper.KEPT if hopper else KEYS[dim].kept
        keys = tile_table(layout.cu_seqlens, tokens, kept, seen=False)
        layout.memo[key] = queries, keys
    return layout.memo[key]


def _whole_heads(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless its heads lie one after the other in rows that a bulk copy can address (16 bytes)."""
    row, head, element = x.stride()
    fits = element == 1 and head == x.shape[2] and row >= x.shape[1] * head and row % 8 == 0
    return x if fits and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def serves(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attention_backward` is written for these heads: 64 or 128 wide, keys and values alike, 16-bit."""
    return q.shape[2] in QUERIES and v.shape[2] == q.shape[2] and q.dtype in (torch.bfloat16, torch.float16)


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``reference.attention.attention_backward`` of heads that it `serves`; deterministic."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tables = _tables(layout, q.shape[0], q.shape[2])
    matrices = (_whole_heads(x) for x in (do, q, k, v, o))
    return _backward_op(*matrices, lse.t().contiguous(), *tables, scale)


__all__ = ["KEYS", "QUERIES", "Tiling", "attention_backward", "serves", "tile_table"]
