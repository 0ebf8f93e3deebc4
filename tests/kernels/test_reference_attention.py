"""Attention: against fp64, and the promise that decode, prefill and the packed training forward give the
same bits.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

import precision_kernels as pk
from precision_kernels import AttentionLayout, reference
from precision_kernels.reference.attention import exact_block, prepare_keys_values
from precision_kernels.reference.layout import WorkUnit
from tests.edge_cases import assert_same_bits, cancelling, generator, mirrored, normal

HEADS, KV_HEADS, DIM = 4, 2, 64


def qkv(
    tokens: int, dtype: torch.dtype, seed: int = 0, dim: int = DIM
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, H, D], k and v [T, Hkv, D]."""
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (
        normal(tokens, heads * dim, seed + i).view(tokens, heads, dim).to(dtype)
        for i, heads in enumerate(sizes)
    )
    return q, k, v


def packed(lengths: list[int]) -> AttentionLayout:
    """The layout of whole sequences without a cache."""
    return AttentionLayout(torch.tensor([0, *lengths]).cumsum(0))


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """fp64 causal attention of one sequence [T, heads, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        t.double().transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 192)]
)
def test_output_is_fp64_attention_rounded_once(dtype: torch.dtype, dim: int) -> None:
    """Within half an ulp of the result plus fp32-sized errors (2e-6 of the largest value): no intermediate
    rounding to c.
    """
    lengths = [5, 1, 130, 300]
    q, k, v = qkv(sum(lengths), dtype, dim=dim)
    out = pk.attention(q, k, v, packed(lengths))
    assert out.dtype == dtype
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        truth = naive(q[part], k[part], v[part], dim**-0.5)
        bound = truth.abs() * torch.finfo(dtype).eps / 2 + 2e-6 * float(v[part].abs().max())
        assert bool(((out[part].double() - truth).abs() <= bound).all()), length
        start += length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sequence_alone_equals_the_sequence_in_any_packing(dtype: torch.dtype) -> None:
    """Order, neighbours (NaN ones too), padding, work-unit budget and 1 or 2 threads change no bit."""
    lengths = [17, 1, 129, 64, 40]
    q, k, v = qkv(sum(lengths), dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [pk.attention(q[a:b], k[a:b], v[a:b], packed([b - a])) for a, b in itertools.pairwise(starts)]
    v = v.clone()
    v[starts[3] : starts[4]] = float("nan")
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
                tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
                out = pk.attention(q[tokens], k[tokens], v[tokens], packed([lengths[i] for i in order]))
                offset = 0
                for i in order:
                    if i != 3:
                        assert_same_bits(
                            out[offset : offset + lengths[i]], alone[i], f"sequence {i} in {order}"
                        )
                    offset += lengths[i]
    finally:
        torch.set_num_threads(before)


def test_cutting_the_work_differently_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets from one query range per unit to everything in one unit give the same output."""
    lengths = [200, 3, 64, 65]
    q, k, v = qkv(sum(lengths), torch.bfloat16)
    expected = pk.attention(q, k, v, packed(lengths))
    monkeypatch.setattr("precision_kernels.reference.layout._SHORTEST_QUERY_RANGE", 7)
    units = AttentionLayout.units
    counts = set()

    for budget in (1, 5000, 1 << 24):

        def cut(self: AttentionLayout, heads: int, kv_heads: int, budget: int = budget) -> list[WorkUnit]:
            found = units(self, heads, kv_heads, budget)
            counts.add(len(found))
            return found

        monkeypatch.setattr(AttentionLayout, "units", cut)
        assert_same_bits(pk.attention(q, k, v, packed(lengths)), expected, f"budget {budget}")
    assert len(counts) == 3


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float64])
def test_decode_with_a_cache_equals_the_packed_forward(storage: torch.dtype) -> None:
    """Token by token, with sequences ending at different times and cache rows in another order: the same
    bits.
    """
    lengths = [5, 1, 140, 33]
    slots = torch.tensor([3, 0, 4, 1])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = qkv(sum(lengths), torch.bfloat16)
    expected = pk.attention(q, k, v, packed(lengths))
    cache = pk.allocate_kv_cache(6, 150, KV_HEADS, DIM, storage)
    out = torch.zeros_like(expected)
    for t in range(max(lengths)):
        alive = [b for b in range(4) if t < lengths[b]]
        tokens = starts[alive] + t
        layout = AttentionLayout(torch.arange(len(alive) + 1), torch.full((len(alive),), t), slots[alive])
        out[tokens] = pk.attention(q[tokens], k[tokens], v[tokens], layout, cache)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("chunk", [1, 7, 128, 200])
def test_chunked_prefill_then_forked_decode_equals_the_packed_forward(chunk: int) -> None:
    """Prefill in chunks, copy the prefix to other rows (group sampling), decode each on: the same bits as
    packed.
    """
    prompt, answer = 150, 9
    q, k, v = qkv(prompt + answer, torch.bfloat16)
    expected = pk.attention(q, k, v, packed([prompt + answer]))
    cache = pk.allocate_kv_cache(3, 170, KV_HEADS, DIM, torch.bfloat16)
    done = 0
    while done < prompt:
        stop = min(prompt, done + chunk)
        part = slice(done, stop)
        layout = AttentionLayout(torch.tensor([0, stop - done]), torch.tensor([done]))
        assert_same_bits(
            pk.attention(q[part], k[part], v[part], layout, cache), expected[part], f"prefill {part}"
        )
        done = stop
    cache.copy_rows(torch.tensor([0, 0]), torch.tensor([1, 2]))
    for t in range(prompt, prompt + answer):
        token = torch.tensor([t, t, t])
        layout = AttentionLayout(torch.arange(4), token)
        out = pk.attention(q[token], k[token], v[token], layout, cache)
        for row in range(3):
            assert_same_bits(out[row], expected[t], f"token {t} row {row}")


def test_value_sums_are_exact_where_everything_cancels() -> None:
    """sum_j p_j v_j over a block equals rational arithmetic on the rounded p and v, though leading digits
    cancel.
    """
    v = cancelling(3, 128, torch.float32).T.contiguous()
    _, unit, exponent = prepare_keys_values(v, v)
    weights = mirrored(4, 128, torch.float32).abs().double() * exponent
    block = weights.clone()
    product = exact_block(block, unit)
    assert float(((block - weights).abs() / weights.amax(-1, keepdim=True)).max()) <= 2.0**-23
    assert float((unit * exponent[:, None] - v.double()).abs().max() / v.abs().max()) <= 2.0**-23
    for i in range(4):
        for d in range(3):
            terms = zip(block[i].tolist(), unit[:, d].tolist(), strict=True)
            assert Fraction(product[i, d].item()) == sum(
                (Fraction(a) * Fraction(b) for a, b in terms), Fraction(0)
            )


def test_a_used_cache_row_can_be_used_again() -> None:
    """Stale keys, NaN ones included, behind a new sequence's length are not seen."""
    q, k, v = qkv(12, torch.bfloat16)
    cache = pk.allocate_kv_cache(1, 40, KV_HEADS, DIM, torch.bfloat16)
    old_q, old_k, old_v = qkv(40, torch.bfloat16, seed=9)
    old_k[20:], old_v[5:] = float("inf"), float("nan")
    layout = AttentionLayout(torch.tensor([0, 40]), torch.tensor([0]))
    pk.attention(old_q, old_k, old_v, layout, cache)
    layout = AttentionLayout(torch.tensor([0, 12]), torch.tensor([0]))
    assert_same_bits(pk.attention(q, k, v, layout, cache), pk.attention(q, k, v, packed([12])))


def test_a_broken_value_reaches_only_the_rows_that_see_it() -> None:
    """inf or NaN in key/value j: rows before j keep their bits, rows from j on are NaN."""
    for broken in (float("nan"), float("inf")):
        q, k, v = qkv(140, torch.bfloat16)
        expected = pk.attention(q, k, v, packed([140]))
        v[70, :, 3] = broken
        out = pk.attention(q, k, v, packed([140]))
        assert_same_bits(out[:70], expected[:70])
        assert torch.isnan(out[70:]).all()


def test_extreme_scores_and_values() -> None:
    """Scores of +-1000, values of 1e30 and 1e-30 beside each other: within fp32-sized errors of fp64."""
    q, k, v = (t * s for t, s in zip(qkv(40, torch.float32), (20.0, 20.0, 1.0), strict=True))
    v[::2] *= 1e30
    v[1::2] *= 1e-30
    out = pk.attention(q, k, v, packed([40]))
    truth = naive(q, k, v, DIM**-0.5)
    # a score of 1000 carries an fp32 rounding of 6e-5, which is relative in its probability
    assert float(((out.double() - truth).abs() / 1e30).max()) < 1e-3


@pytest.mark.parametrize("lengths", [[5, 1, 130, 200], [64, 64, 64]])
def test_fp32_gradients_match_fp64_autograd(lengths: list[int]) -> None:
    """Relative error below 2e-6: fp32 products of up to 200 terms."""
    inputs = qkv(sum(lengths), torch.float32)
    leaves = [t.clone().requires_grad_() for t in inputs]
    do = normal(sum(lengths), HEADS * DIM, 7).view(-1, HEADS, DIM)
    actual = torch.autograd.grad(pk.attention(*leaves, packed(lengths)), leaves, do)
    wide = [t.double().requires_grad_() for t in inputs]
    parts = torch.stack(
        [torch.tensor([0, *lengths]).cumsum(0)[:-1], torch.tensor([0, *lengths]).cumsum(0)[1:]], 1
    ).tolist()
    truth = torch.cat([naive(*(t[a:b] for t in wide), DIM**-0.5) for a, b in parts])
    for a, e in zip(actual, torch.autograd.grad(truth, wide, do.double()), strict=True):
        assert float((a.double() - e).norm() / e.norm()) < 2e-6


def test_bf16_gradients_match_fp64_autograd() -> None:
    """Relative error below 1 %: o and the gradients are rounded to bf16 (2^-9 each), the rest is fp32."""
    inputs = qkv(90, torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in inputs]
    do = normal(90, HEADS * DIM, 7).view(-1, HEADS, DIM).bfloat16()
    actual = torch.autograd.grad(pk.attention(*leaves, packed([90])), leaves, do)
    wide = [t.double().requires_grad_() for t in inputs]
    for a, e in zip(actual, torch.autograd.grad(naive(*wide, DIM**-0.5), wide, do.double()), strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - e).norm() / e.norm()) < 0.01


def test_memory_stays_bounded_for_long_sequences() -> None:
    """2048 tokens: no work unit of the default budget holds more than 64 query rows x all keys."""
    layout = packed([2048, 100, 50])
    for unit in layout.units(HEADS, KV_HEADS):
        assert unit.query_rows.shape[0] * unit.query_rows.shape[-1] // 2 * unit.keys <= 64 * 2048


def test_every_query_is_handled_exactly_once() -> None:
    """The rows of all units, without their padding, are a permutation of the packed queries, and keys
    suffice.
    """
    lengths = torch.randint(1, 90, (40,), generator=generator(3)).tolist()
    layout = packed(lengths)
    seen = []
    for unit in layout.units(HEADS, KV_HEADS):
        rows = unit.query_rows.view(len(unit.sequences), HEADS, -1)
        real = torch.ones_like(rows, dtype=torch.bool)
        if unit.padding is not None:
            real &= ~unit.padding[..., 0]
        seen.append(rows[real])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(sum(lengths) * HEADS))


def test_wrong_layouts_and_shapes_are_named() -> None:
    """Errors list what is wrong with the values given."""
    with pytest.raises(ValueError, match="no empty sequence"):
        AttentionLayout(torch.tensor([0, 3, 3]))
    with pytest.raises(ValueError, match=r"slots must differ.*"):
        AttentionLayout(torch.tensor([0, 3, 4]), None, torch.tensor([1, 1]))
    q, k, v = qkv(4, torch.bfloat16)
    with pytest.raises(ValueError, match="the layout packs 5 tokens, q has 4"):
        pk.attention(q, k, v, packed([5]))
    with pytest.raises(ValueError, match="no cache was given"):
        pk.attention(q, k, v, AttentionLayout(torch.tensor([0, 4]), torch.tensor([2])))
    cache = pk.allocate_kv_cache(1, 3, KV_HEADS, DIM, torch.bfloat16)
    with pytest.raises(ValueError, match="1 rows x 3 tokens"):
        pk.attention(q, k, v, AttentionLayout(torch.tensor([0, 4]), torch.tensor([0])), cache)
    with pytest.raises(RuntimeError, match="no gradient flows"):
        pk.attention(q.float().requires_grad_(), k.float(), v.float(), packed([4]), cache)


def test_reference_returns_the_log_sum_exp() -> None:
    """lse [T, H] is log sum exp of the scaled scores: what a backward (or another implementation) needs."""
    q, k, v = qkv(20, torch.float32)
    _, lse = reference.attention(q, k, v, packed([20]))
    scores = torch.einsum("thd,shd->ths", q.double(), k.double().repeat_interleave(2, 1)) * DIM**-0.5
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)[:, None]
    torch.testing.assert_close(
        lse.double(), scores.masked_fill(hidden, float("-inf")).logsumexp(-1), rtol=1e-6, atol=1e-6
    )
