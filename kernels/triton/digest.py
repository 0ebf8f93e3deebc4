"""The checksum of tensors as a Triton kernel: bit-equal to `reference.digest`, where it is defined.

One launch per tensor, no synchronisation, no memory but two 64-bit sums: sums modulo 2^64 have equal bits in any order,
so the blocks add theirs with atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from precision_kernels.reference import digest

_A, _B, _C, _D = (tl.constexpr(c) for c in (digest.A, digest.B, digest.C, digest.D))
_BLOCK, _ROUNDS = 2048, 8


@triton.jit
def _mixed(words, index):
    """f and h of `reference.digest`, int64 words at int64 positions -> uint64."""
    x = (words.to(tl.uint64, bitcast=True) + (index + 1).to(tl.uint64, bitcast=True) * _A) * _B
    x = (x ^ (x >> 32)) * _C
    f = x ^ (x >> 32)
    h = f * _D
    return f, h ^ (h >> 29)


@triton.jit
def _signed_sum(values, inside):
    return tl.sum(tl.where(inside, values.to(tl.int64, bitcast=True), 0), 0)


@triton.jit(do_not_specialize=["first", "whole", "tail"])
def _digest_kernel(
    words, data, lanes, first, whole, tail, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """lanes [2] += those of `whole` int64 words and of the `tail` < 8 bytes after them; word 0 has index `first`."""
    first = first.to(tl.int64)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    f_sum = tl.zeros((BLOCK,), tl.uint64)
    h_sum = tl.zeros((BLOCK,), tl.uint64)
    for part in tl.static_range(ROUNDS):
        index = base + part * BLOCK + tl.arange(0, BLOCK)
        inside = index < whole
        f, h = _mixed(tl.load(words + index, inside, 0), first + index)
        f_sum += tl.where(inside, f, 0)
        h_sum += tl.where(inside, h, 0)
    everywhere = tl.full((BLOCK,), True, tl.int1)
    tl.atomic_add(lanes, _signed_sum(f_sum, everywhere))
    tl.atomic_add(lanes + 1, _signed_sum(h_sum, everywhere))
    if (tl.program_id(0) == 0) & (tail > 0):
        byte = tl.arange(0, 8)
        last = tl.load(data + whole * 8 + byte, byte < tail, 0).to(tl.int64) << (byte.to(tl.int64) * 8)
        word, place = tl.zeros((1,), tl.int64) + tl.sum(last, 0), tl.zeros((1,), tl.int64) + (first + whole)
        tail_f, tail_h = _mixed(word, place)
        once = tl.full((1,), True, tl.int1)
        tl.atomic_add(lanes, _signed_sum(tail_f, once))
        tl.atomic_add(lanes + 1, _signed_sum(tail_h, once))


def tensor_digest(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None) -> torch.Tensor:
    """``reference.digest.tensor_digest``: int64 [n, 2] on the tensors' device; returns before the GPU is done."""
    device = tensors[0].device if tensors else torch.device("cpu")
    lanes = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    for row, tensor, first in zip(lanes, tensors, digest.check_starts(tensors, starts), strict=True):
        data = digest.flat_bytes(tensor)
        whole, tail = divmod(data.numel(), digest.WORD)
        if not data.numel():
            continue
        grid = (max(1, triton.cdiv(whole, _BLOCK * _ROUNDS)),)
        words = data[: whole * digest.WORD].view(torch.int64)
        _digest_kernel[grid](words, data, row, first, whole, tail, BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=8)
    return lanes
