"""Backward of packed attention in Triton: against the definition and fp64, alone and packed, whatever lies around."""

from __future__ import annotations

import itertools

import pytest
import torch

from precision_kernels.reference import AttentionLayout
from precision_kernels.reference import attention as attend
from precision_kernels.reference import attention_backward as definition
from precision_kernels.triton import attention as kernels
from tests.edge_cases import assert_same_bits, normal
from tests.kernels.triton_cases import DEVICE, GPU

pytestmark = pytest.mark.slow

DTYPES = (torch.float16, torch.bfloat16) if GPU else (torch.float16,)
"""The interpreter multiplies the bit patterns of bf16 matrices as integers."""
EDGES = [1, 2, 31, 32, 33, 64, 97, 128, 129]
"""Lengths around a step and a tile, one of them of one token."""


def packed(lengths: list[int]) -> AttentionLayout:
    """Whole sequences, one after the other."""
    return AttentionLayout(torch.tensor([0, *lengths], device=DEVICE).cumsum(0))


def case(lengths, heads=4, kv_heads=2, dim=64, dtype=torch.float16, seed=0):
    """do, q, k, v, o, lse of the definition, on the device of the kernels."""
    tokens = sum(lengths)
    do, q, k, v = (
        normal(tokens, h * dim, seed + i).view(tokens, h, dim).to(dtype)
        for i, h in enumerate((heads, heads, kv_heads, kv_heads))
    )
    o, lse = attend(q, k, v, AttentionLayout(torch.tensor([0, *lengths]).cumsum(0)))
    return [x.to(DEVICE) for x in (do, q, k, v, o, lse)]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((actual.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm())


def close(actual, expected, bound: float) -> None:
    """dq, dk and dv within a relative error."""
    for name, a, e in zip(("dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert error(a, e) < bound, f"{name}: {error(a, e):.2e}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (4, 2)])
def test_gradients_are_the_definitions(heads: int, kv_heads: int) -> None:
    """Within 1e-3 of the fp32 definition in fp16 (2^-11 is 5e-4), for groups of 1, 2 and 3 heads and all edges."""
    inputs = case(EDGES, heads, kv_heads)
    expected = definition(*(x.cpu() for x in inputs), AttentionLayout(packed(EDGES).cu_seqlens.cpu()))
    close(kernels.attention_backward(*inputs, packed(EDGES)), expected, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_128_and_a_scale(dtype: torch.dtype) -> None:
    """The tiling of 128-wide heads, with a scale that is not their default."""
    do, q, k, v, *_ = case([65, 1, 130], 2, 1, 128, dtype)
    layout = AttentionLayout(torch.tensor([0, 65, 66, 196]))
    o, lse = attend(*(x.cpu() for x in (q, k, v)), layout, scale=0.2)
    inputs = [do, q, k, v, o.to(DEVICE), lse.to(DEVICE)]
    expected = definition(*(x.cpu() for x in inputs), layout, 0.2)
    bound = 1e-3 if dtype == torch.float16 else 7e-3
    close(kernels.attention_backward(*inputs, packed([65, 1, 130]), 0.2), expected, bound)


def test_a_sequence_alone_has_the_bits_that_it_has_packed() -> None:
    """Order and neighbours change no bit, even where the neighbours are NaN."""
    lengths = [33, 160, 1, 129]
    starts = [0, *itertools.accumulate(lengths)]
    inputs = case(lengths)
    alone = [
        kernels.attention_backward(*(x[a:b] for x in inputs), packed([b - a]))
        for a, b in itertools.pairwise(starts)
    ]
    for order, broken in (([0, 1, 2, 3], None), ([3, 1, 0, 2], None), ([1, 3, 0, 2], 3)):
        parts = [[x[starts[i] : starts[i + 1]] for x in inputs] for i in order]
        if broken is not None:
            parts[order.index(broken)] = [torch.full_like(x, torch.nan) for x in parts[order.index(broken)]]
        both = [torch.cat(x) for x in zip(*parts, strict=True)]
        results = kernels.attention_backward(*both, packed([lengths[i] for i in order]))
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            for i, part in zip(order, result.split([lengths[i] for i in order]), strict=True):
                if i != broken:
                    expected = alone[i][("dq", "dk", "dv").index(name)]
                    assert_same_bits(part.contiguous(), expected, f"{name} of {i} in {order}")


def test_views_need_no_copy_and_others_are_copied() -> None:
    """q, k and v as columns of one matrix, transposed heads, a start between 16-byte addresses: the same bits."""
    lengths = [40, 70]
    do, q, k, v, o, lse = case(lengths)
    expected = kernels.attention_backward(do, q, k, v, o, lse, packed(lengths))
    joint = torch.cat((q, k, v), 1).split([4, 2, 2], 1)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    apart = torch.zeros(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)
    for name, views in (("joint", joint), ("turned", turned), ("apart", (apart, k, v))):
        actual = kernels.attention_backward(do, *views, o, lse.t().contiguous().t(), packed(lengths))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e, name)


def test_tiles_cover_every_row_once_and_the_longest_come_first() -> None:
    """Of packed sequences, tiles of a sequence and none that crosses its end; what is left over is empty."""
    lengths = torch.tensor([*EDGES, 500, 1])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    tokens = int(starts[-1])
    for rows, seen in ((64, False), (128, True)):
        table = kernels.tile_table(starts, tokens, rows, seen).long()
        padded = (lengths + 127) // 128 * 128
        covered = torch.zeros(tokens, dtype=torch.int64)
        work = []
        for start, length, first, base in table.tolist():
            assert base == int((padded[starts[:-1] < start]).sum())
            assert length == 0 or lengths[starts[:-1] == start].item() == length
            covered[start + first : start + min(first + rows, length)] += 1
            work.append(first if seen else length - first)
        assert bool((covered == 1).all())
        used = int((table[:, 1] > 0).sum())
        assert used == int(((lengths + rows - 1) // rows).sum())
        assert work[:used] == sorted(work[:used], reverse=True)
        assert not table[used:, 1:3].any()


def test_which_heads_are_served() -> None:
    """16-bit heads of 64 or 128, keys and values alike; others are left to another kernel."""
    heads = lambda dim, dtype=torch.bfloat16: torch.zeros(1, 2, dim, dtype=dtype)  # noqa: E731
    assert kernels.serves(heads(64), heads(64))
    assert kernels.serves(heads(128, torch.float16), heads(128, torch.float16))
    assert not kernels.serves(heads(96), heads(96))
    assert not kernels.serves(heads(128), heads(64))
    assert not kernels.serves(heads(128, torch.float32), heads(128, torch.float32))
