"""Gradients of keys and values on Hopper with explicit asynchronous products: `attention._keys_kernel` in Gluon.

Triton waits for every product before anything else runs in a warp. Here exp(S) is computed while dO V^T is under way,
dS while P^T dO is, and the next step's first products queue behind dS^T Q: 618 instead of 466 TFLOPS of products on an
H200 (4 x 2048 tokens, 32 heads of 128). Two programs of one warpgroup share a multiprocessor.

Gluon is Triton's experimental language and not run by its interpreter: `attention` says where this kernel is taken.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

KEPT = 64
STEP = 64
_STAGES = gl.constexpr(2)
_WARPS = gl.constexpr(4)
_LOG2E = gl.constexpr(1.4426950408889634)
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _tile(tiles):
    entry = tiles + gl.program_id(1) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def _walk(group, length, first, KEPT: gl.constexpr, STEP: gl.constexpr):
    """Steps of each head as in `attention._keys_kernel`: those near the diagonal, these and a cut one, whole ones."""
    near = gl.cdiv(gl.minimum(length - first, KEPT), STEP)
    rest = gl.maximum(length - first - KEPT, 0)
    return group, first, near, near + (rest % STEP != 0).to(gl.int32), rest // STEP


@gluon.jit
def _step(i, walk, KEPT: gl.constexpr, STEP: gl.constexpr):
    """Head of the group and first row of step i: all edges of all heads, then all whole steps."""
    group, first, near, edges, whole = walk
    j = i - group * edges
    edge_head = i // gl.maximum(edges, 1)
    step = i - edge_head * edges
    edge_row = first + gl.where(step < near, step * STEP, KEPT + whole * STEP)
    head = j // gl.maximum(whole, 1)
    row = first + KEPT + (j - head * whole) * STEP
    return gl.where(j < 0, edge_head, head), gl.where(j < 0, edge_row, row)


@gluon.jit
def _fetch(i, steps, walk, tile, sources, buffers, arrived, KEPT: gl.constexpr, STEP: gl.constexpr):
    """Starts the copies of step i, if there is one, into the buffers of step i - 2."""
    # One barrier per buffer counts the bytes of its three bulk copies: q and dO of a step, and lse and delta of its
    # rows. Beyond the last step nothing is copied, and nobody waits.
    start, base, first_head = tile
    q, do, per_row = sources
    q_rows, do_rows, numbers = buffers
    head, row = _step(i, walk, KEPT, STEP)
    head += first_head
    D: gl.constexpr = q.block_type.shape[1]
    slot = i % _STAGES
    real = i < steps
    barrier = arrived.index(slot)
    size: gl.constexpr = q.block_type.nbytes + do.block_type.nbytes + per_row.block_type.nbytes
    mbarrier.expect(barrier, size, pred=real)
    tma.async_copy_global_to_shared(q, [start + row, head * D], barrier, q_rows.index(slot), pred=real)
    tma.async_copy_global_to_shared(do, [start + row, head * D], barrier, do_rows.index(slot), pred=real)
    tma.async_copy_global_to_shared(per_row, [2 * head, base + row], barrier, numbers.index(slot), pred=real)


@gluon.constexpr_function
def _copied(D):
    """How threads share a tile of rows, 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [_WARPS.value, 1], [1, 0])


@gluon.jit
def _forget_neighbours(rows, count, layout: gl.constexpr):
    """Zeros in place of rows from ``count`` on: 0 times a neighbour's NaN is NaN."""
    inside = gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout)) < count
    rows.store(gl.where(inside[:, None], rows.load(layout), 0.0))


@gluon.jit
def _add(
    i, steps, dk, dv, k, v, walk, tile, sources, buffers, arrived, keys, length, scale, KEPT: gl.constexpr,
    STEP: gl.constexpr, EDGE: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    # Shared memory: k and v of the tile, and two buffers of q, dO and the rows' numbers. Registers: dk, dv, S, dP
    # in fp32.
    q_rows, do_rows, numbers = buffers
    slot = i % _STAGES
    q = q_rows.index(slot)
    do = do_rows.index(slot)
    per_row = numbers._reinterpret(gl.float32, [2 * _STAGES, STEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    # Phase 1: the copies of this step have arrived. The parity is that of the buffer's use.
    mbarrier.wait(arrived.index(slot), i // _STAGES & 1)
    # A step that the sequence's end cuts holds rows of the neighbour: they are cleared in shared memory before a
    # product reads them.
    if EDGE:
        _, row = _step(i, walk, KEPT, STEP)
        if row + STEP > length:
            _forget_neighbours(q, length - row, _copied(q.shape[1]))
            _forget_neighbours(do, length - row, _copied(q.shape[1]))
            fence_async_shared()
            gl.thread_barrier()
    # Phase 2: S = K Q^T and dP = V dO^T are started together; S is waited for, dP is not.
    zeros = gl.zeros([KEPT, STEP], gl.float32, s_layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    # Phase 3: the buffers of the step before are free, and its successor's copies start.
    # Every product but dp is done, so nothing reads the buffers of step i - 1.
    gl.thread_barrier()
    _fetch(i + _STAGES - 1, steps, walk, tile, sources, buffers, arrived, KEPT, STEP)
    # Phase 4: P while dP is under way.
    p = gl.exp2(s * scale - per_row.index(2 * slot).load(columns)[None, :])
    if EDGE:
        p = gl.where(keys[:, None] <= (row + gl.arange(0, STEP, columns))[None, :], p, 0.0)
    # Phase 5: dv += P dO starts from registers; dS is computed meanwhile, then dk += dS Q starts, and the next
    # step's first products queue behind it.
    dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), p_layout), do, dv, is_async=True)
    delta = per_row.index(2 * slot + 1).load(columns)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(q.dtype), p_layout)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    return dk, dv


@gluon.jit
def _buffers(sources, STEP: gl.constexpr):
    """Two of each, and the barriers that tell when they are filled."""
    q, do, per_row = sources
    D: gl.constexpr = q.block_type.shape[1]
    q_rows = gl.allocate_shared_memory(q.dtype, [_STAGES, STEP, D], q.layout)
    do_rows = gl.allocate_shared_memory(do.dtype, [_STAGES, STEP, D], do.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [_STAGES, 2, STEP], per_row.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    return (q_rows, do_rows, numbers), arrived


@gluon.jit
def _keep(x, first, stride, length, D: gl.constexpr, KEPT: gl.constexpr):
    """A tile of keys or values in shared memory, zeros behind the sequence's end."""
    copied: gl.constexpr = _copied(D)
    rows = first + gl.arange(0, KEPT, gl.SliceLayout(1, copied))
    at = x + rows[:, None] * stride + gl.arange(0, D, gl.SliceLayout(0, copied))[None, :]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEPT, D], x.dtype.element_ty)
    values = gl.load(at, mask=(rows < length)[:, None], other=0.0)
    return gl.allocate_shared_memory(x.dtype.element_ty, [KEPT, D], layout, values)


@gluon.jit
def _store(out, x, stride, column, start, first, length, layout: gl.constexpr):
    rows = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    at = (start + rows).to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(out + at, x.to(out.dtype.element_ty), mask=(rows < length)[:, None])


@gluon.jit
def keys_kernel(
    q, k, v, do, per_row, dk, dv, tiles, scale, k_t, v_t, dk_t, GROUP, D: gl.constexpr, KEPT: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    # A program per key head and tile of 64 keys, one warpgroup. Two programs share a multiprocessor: one computes
    # exp while the other multiplies. One program of two warpgroups with three buffers took 0.51 ms instead of 0.45
    # (H200, 4 x 2048 tokens).
    kv = gl.program_id(0)
    start, length, first, base = _tile(tiles)
    tile = (start, base, kv * GROUP)
    sources = (q, do, per_row)
    # Accumulators of wgmma: S and dP [64, STEP], dk and dv [64, D]; P and dS become its left operand in registers.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, STEP, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    walk = _walk(GROUP, length, first, KEPT, STEP)
    edge_steps = GROUP * walk[3]
    steps = edge_steps + GROUP * walk[4]
    # Copies of the first step are on their way while k and v of the tile are loaded.
    buffers, arrived = _buffers(sources, STEP)
    fence_async_shared()
    gl.thread_barrier()
    for i in gl.static_range(_STAGES - 1):
        _fetch(i, steps, walk, tile, sources, buffers, arrived, KEPT, STEP)
    k = _keep(k + start.to(gl.int64) * k_t + kv * D, first, k_t, length, D, KEPT)
    v = _keep(v + start.to(gl.int64) * v_t + kv * D, first, v_t, length, D, KEPT)
    fence_async_shared()
    gl.thread_barrier()
    dk_sum = warpgroup_mma_init(gl.zeros([KEPT, D], gl.float32, d_layout))
    dv_sum = warpgroup_mma_init(gl.zeros([KEPT, D], gl.float32, d_layout))
    keys = first + gl.arange(0, KEPT, gl.SliceLayout(1, s_layout))
    c = scale * _LOG2E
    # Steps near the diagonal and cut ones, with masks; then all others.
    for i in range(edge_steps):
        dk_sum, dv_sum = _add(
            i, steps, dk_sum, dv_sum, k, v, walk, tile, sources, buffers, arrived, keys, length, c, KEPT, STEP, True,
            s_layout, p_layout,
        )  # fmt: skip
    for i in range(edge_steps, steps):
        dk_sum, dv_sum = _add(
            i, steps, dk_sum, dv_sum, k, v, walk, tile, sources, buffers, arrived, keys, length, c, KEPT, STEP, False,
            s_layout, p_layout,
        )  # fmt: skip
    # The last products, then each gradient is written once.
    dk_sum, dv_sum = warpgroup_mma_wait(0, deps=[dk_sum, dv_sum])
    _store(dk, dk_sum * scale, dk_t, kv * D, start, first, length, d_layout)
    _store(dv, dv_sum, dk_t, kv * D, start, first, length, d_layout)


@functools.cache
def _layout(dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([STEP, dim], _ELEMENTS[dtype])


def _steps_of(x: torch.Tensor) -> TensorDescriptor:
    """x [T, H, D] as a matrix [T, H * D] that is copied by STEP rows of one head."""
    tokens, heads, dim = x.shape
    return TensorDescriptor(x, [tokens, heads * dim], [x.stride(0), 1], [STEP, dim], _layout(dim, x.dtype))


_NUMBERS = gl.NVMMASharedLayout(0, 32, 2)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, per_row: torch.Tensor, dk: torch.Tensor,
    dv: torch.Tensor, tiles: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Writes dk and dv [T, Hkv, D]; per_row fp32 [H, 2, P] and tiles of KEPT rows as in `attention`."""
    heads, _, padded = per_row.shape
    numbers = TensorDescriptor(per_row, [2 * heads, padded], [padded, 1], [2, STEP], _NUMBERS)
    keys_kernel[(k.shape[1], len(tiles))](
        _steps_of(q), k, v, _steps_of(do), numbers, dk, dv, tiles, scale, k.stride(0), v.stride(0), dk.stride(0),
        heads // k.shape[1], D=q.shape[2], KEPT=KEPT, STEP=STEP, num_warps=_WARPS.value,
    )  # fmt: skip


__all__ = ["KEPT", "STEP", "launch"]
