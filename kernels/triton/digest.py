"""The checksum of tensors as a Triton kernel: bit-equal to `reference.digest`, where it is defined.

One launch for all tensors and no synchronisation: a table says where each tensor lies, another one which tensor a block
of the grid works on. Sums modulo 2^64 have equal bits in any order, so blocks add theirs with atomics. Launching once
per tensor took 60 µs each on an H200's host: 0.04 s for the 650 tensors of an 8B model, most of it the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference import digest
from precision_kernels.triton.launch import VERSION

_A, _B, _C, _D = (tl.constexpr(c) for c in (digest.A, digest.B, digest.C, digest.D))
_BLOCK, _ROUNDS = 1024, 16
_WORDS = _BLOCK * _ROUNDS  # of one block of the grid
_STEP = tl.constexpr(_BLOCK * digest.A % (1 << 64))


@triton.jit
def _mixed(words, place):
    """f and h of `reference.digest` for int64 words; place uint64 = (i + 1) · A."""
    x = (words.to(tl.uint64, bitcast=True) + place) * _B
    x = (x ^ (x >> 32)) * _C
    f = x ^ (x >> 32)
    h = f * _D
    return f, h ^ (h >> 29)


@triton.jit
def _signed_sum(values):
    return tl.sum(values.to(tl.int64, bitcast=True), 0)


@triton.jit
def _digest_kernel(table, owners, lanes, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """lanes [n, 2] += those of the words that this block is for.

    table int64 [n, 4]: address, index of word 0, number of bytes, first block of the grid. owners int32 [grid]: row.
    """
    # Which tensor, and which of its words: one launch serves all tensors (a launch each took 60 us of the host).
    row = tl.load(owners + tl.program_id(0))
    entry = table + row.to(tl.int64) * 4
    address = tl.load(entry)
    words = address.to(tl.pointer_type(tl.int64))
    first, size, start = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    whole = size // 8
    base = (tl.program_id(0) - start) * (BLOCK * ROUNDS)
    lane = tl.arange(0, BLOCK)
    # (i + 1) A of each lane's first word; later words add a constant, so no 64-bit product is made per word for it.
    place = (first + base + 1 + lane).to(tl.uint64, bitcast=True) * _A
    f_sum = tl.zeros((BLOCK,), tl.uint64)
    h_sum = tl.zeros((BLOCK,), tl.uint64)
    # 16 rounds of 1024 words, 8 kB at a time, each thread four neighbouring words; sums stay in registers. A block
    # that is full needs no mask.
    if base + BLOCK * ROUNDS <= whole:
        for _ in tl.static_range(ROUNDS):
            f, h = _mixed(tl.load(words + base + lane), place)
            f_sum += f
            h_sum += h
            base += BLOCK
            place += _STEP
    else:
        for _ in tl.static_range(ROUNDS):
            inside = base + lane < whole
            f, h = _mixed(tl.load(words + base + lane, inside, 0), place)
            f_sum += tl.where(inside, f, 0)
            h_sum += tl.where(inside, h, 0)
            base += BLOCK
            place += _STEP
    # Sums modulo 2^64 have the same bits in any order: atomics do no harm here.
    tl.atomic_add(lanes + row * 2, _signed_sum(f_sum))
    tl.atomic_add(lanes + row * 2 + 1, _signed_sum(h_sum))
    # The last bytes, if they make no whole word, are put together by the tensor's last block.
    tail = size - whole * 8
    final = (size - 1) // (8 * BLOCK * ROUNDS)
    if (tl.program_id(0) - start == final) & (tail > 0):  # bytes that make no whole word
        byte = tl.arange(0, 8).to(tl.int64)
        data = address.to(tl.pointer_type(tl.uint8)) + whole * 8
        word = tl.sum(tl.load(data + byte, byte < tail, 0).to(tl.int64) << (byte * 8), 0)
        last = tl.zeros((1,), tl.int64) + (first + whole + 1)
        tail_f, tail_h = _mixed(tl.zeros((1,), tl.int64) + word, last.to(tl.uint64, bitcast=True) * _A)
        tl.atomic_add(lanes + row * 2, _signed_sum(tail_f))
        tl.atomic_add(lanes + row * 2 + 1, _signed_sum(tail_h))


@implements("triton", VERSION)
def tensor_digest(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None) -> torch.Tensor:
    """``reference.digest.tensor_digest``: int64 [n, 2] on the tensors' device; returns before the GPU is done."""
    device = tensors[0].device if tensors else torch.device("cpu")
    lanes = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    firsts = digest.check_starts(tensors, starts)
    flat = [digest.flat_bytes(tensor) for tensor in tensors]
    blocks = np.array([-(-data.numel() // (digest.WORD * _WORDS)) for data in flat], dtype=np.int64)
    if not blocks.any():
        return lanes
    owners = np.repeat(np.arange(len(flat), dtype=np.int32), blocks)
    entries = [
        (data.data_ptr(), first, data.numel(), start)
        for data, first, start in zip(flat, firsts, np.cumsum(blocks) - blocks, strict=True)
    ]
    table = torch.tensor(entries, dtype=torch.int64).to(device)
    _digest_kernel[(len(owners),)](
        table, torch.from_numpy(owners).to(device), lanes, BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=8
    )
    return lanes
