"""How an update is cut into buckets: both sides compute it from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rllib_llm.weights.format import DTYPES, TensorSpec

ALIGN = 256
"""Tensors begin at multiples of this in the stream, in bytes: wide loads need it, and checksums cut at whole words."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of tensor `name`; they lie at byte `at` of their bucket."""

    name: str
    start: int
    stop: int
    at: int


def nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def buckets(specs: Mapping[str, TensorSpec], size: int) -> list[list[Piece]]:
    """The pieces of each bucket of at most `size` bytes, in the order of `specs`; large tensors are cut.

    Raises:
        ValueError: size is not a positive multiple of `ALIGN`.
    """
    if size < ALIGN or size % ALIGN:
        raise ValueError(f"bucket size {size}: must be a positive multiple of {ALIGN} bytes")
    full: list[list[Piece]] = [[]]
    at = 0
    for name, spec in specs.items():
        start, total = 0, nbytes(spec)
        while start < total:
            if at == size:
                full.append([])
                at = 0
            stop = min(total, start + size - at)
            full[-1].append(Piece(name, start, stop, at))
            at += -(-(stop - start) // ALIGN) * ALIGN
            start = stop
    return [pieces for pieces in full if pieces]


def used(pieces: list[Piece]) -> int:
    """Bytes of a bucket up to the end of its last piece."""
    last = pieces[-1]
    return last.at + last.stop - last.start
