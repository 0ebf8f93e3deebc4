"""A checksum of a tensor's bytes that a GPU computes at memory bandwidth, with equal bits on every device.

The bytes (row-major, little-endian) are read as 64-bit words w_0, w_1, … (the last one filled with zero bytes). In
arithmetic modulo 2^64, with ≫ a logical shift:

    u = (w_i + (i + 1) · A) · B      g = (u ⊕ u ≫ 32) · C      f_i = g ⊕ g ≫ 32
    v = f_i · D                      h_i = v ⊕ v ≫ 29          lanes = (Σ f_i, Σ h_i)

Every step is a bijection of w_i for a given i, so a change inside one word always changes both lanes. Changes of
several words, and words at another place, are missed with a chance of about 2^-128. The sums do not depend on the order
of evaluation, and parts of a tensor may be summed apart, each from its own first word: so that a tensor can be checked
while it streams through a small buffer.

This detects errors (a damaged, lost, stale, moved or mixed-up byte), not adversaries: collisions can be constructed.
Length, dtype and shape are not in the lanes; `rllib_llm.weights.format.tensor_hash` hashes them with the lanes.
A, B and D are the odd constants of splitmix64 (Steele, Lea, Flood 2014), C is the first one of MurmurHash3's finaliser.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from precision_kernels.declaration import define

A, B, C, D = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD, 0x94D049BB133111EB
WORD = 8
_CHUNK = 1 << 15  # words at a time: the scratch stays in a core's second-level cache


def signed(value: int) -> int:
    """A number modulo 2^64 as int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@functools.cache
def _steps(device: torch.device) -> torch.Tensor:
    """(i + 1) · A for the first `_CHUNK` words."""
    return torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device).mul_(signed(A))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] in row-major order, at an address that 64-bit loads can read: a view, else a copy."""
    if tensor.numel() == 0:  # arrays without elements have whatever strides
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat if flat.data_ptr() % WORD == 0 else flat.clone()


def check_starts(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None) -> list[int]:
    """First words of the parts; see `tensor_digest`.

    Raises:
        ValueError: not one per tensor, negative, or not at a whole word.
    """
    starts = [0] * len(tensors) if starts is None else list(starts)
    if len(starts) != len(tensors) or any(start < 0 or start % WORD for start in starts):
        raise ValueError(
            f"tensor_digest: starts must be {len(tensors)} non-negative multiples of {WORD}, got {starts[:8]}"
        )
    return [start // WORD for start in starts]


@define
def tensor_digest(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None) -> torch.Tensor:
    """The two lanes of each tensor, or of a part of one.

    Args:
        tensors: any dtype and shape, on one device.
        starts: of tensors that are parts of others: where each begins there, in bytes, a multiple of 8. Lanes of
            parts add up (modulo 2^64) to those of the whole, if all parts but the last are multiples of 8 bytes.

    Returns:
        int64 [n, 2], on the device of the tensors.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    lanes = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    for row, tensor, first in zip(lanes, tensors, check_starts(tensors, starts), strict=True):
        data = flat_bytes(tensor)
        whole = data.numel() // WORD * WORD
        words = data[:whole].view(torch.int64)
        for index in range(0, len(words), _CHUNK):
            _add(row, words[index : index + _CHUNK], first + index)
        if whole < data.numel():
            tail = torch.zeros(WORD, dtype=torch.uint8, device=device)
            tail[: data.numel() - whole] = data[whole:]
            _add(row, tail.view(torch.int64), first + whole // WORD)
    return lanes


def _add(lanes: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add f and h of words first, first + 1, … to lanes [2]. int64 wraps around in torch, its shift is arithmetic."""
    x = (words + _steps(words.device)[: len(words)]).add_(signed(first * A)).mul_(signed(B))
    shifted = torch.empty_like(x)
    x.bitwise_xor_(_shift(x, 32, shifted)).mul_(signed(C))
    x.bitwise_xor_(_shift(x, 32, shifted))
    lanes[0] += x.sum()
    x.mul_(signed(D))
    x.bitwise_xor_(_shift(x, 29, shifted))
    lanes[1] += x.sum()


def _shift(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    torch.bitwise_right_shift(x, bits, out=out)
    return out.bitwise_and_((1 << (64 - bits)) - 1)


__all__ = ["tensor_digest"]
