"""Every mismatch metric against hand-worked numbers and a plain-Python implementation; the awkward inputs."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.mismatch import METRICS, MismatchInputError, metrics, response_positions
from rllib_llm.mismatch.registry import BUCKETED
from tests.random_examples import examples

NAMES = {m.name for m in METRICS}


def reference(train: list[float], rollout: list[float], ids: list[int]) -> dict[str, float]:
    """The definitions in Python floats and loops; shares nothing with rllib_llm. All inputs finite."""
    n = len(train)
    d = [t - r for t, r in zip(train, rollout, strict=True)]
    rho = [math.exp(max(-20.0, min(20.0, x))) for x in d]
    per_response = [[x for x, i in zip(d, ids, strict=True) if i == j] for j in sorted(set(ids))]

    def clamp(x: float) -> float:
        return max(-20.0, min(20.0, x))

    out = {
        "num_tokens": n,
        "nonfinite_tokens": 0,
        "k1": -sum(d) / n,
        "k2": sum(x * x for x in d) / (2 * n),
        "k3": sum(p - 1 - clamp(x) for p, x in zip(rho, d, strict=True)) / n,
        "mean_abs": sum(map(abs, d)) / n,
        "max_abs": max(map(abs, d)),
        "p99_abs": sorted(map(abs, d))[math.ceil(0.99 * n) - 1],
        "bit_equal_share": sum(t == r for t, r in zip(train, rollout, strict=True)) / n,
        "train_higher_share": sum(x > 0 for x in d) / n,
        "ppl_ratio": statistics.fmean(math.exp(clamp(-statistics.fmean(x))) for x in per_response),
        "chi2": sum(p * p for p in rho) / n - 1,
        "chi2_sequence": statistics.fmean(math.exp(2 * clamp(sum(x))) - 1 for x in per_response),
        "ess": sum(rho) ** 2 / (n * sum(p * p for p in rho)),
        "multiplicative_error": statistics.fmean(math.exp(min(20.0, abs(x))) for x in d),
    }
    p, q = [math.exp(x) for x in train], [math.exp(x) for x in rollout]
    if n > 1 and len(set(p)) > 1 and len(set(q)) > 1:
        out["pearson"] = statistics.correlation(p, q)
    return out


def as_fp32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


def test_hand_worked_example() -> None:
    """Two responses; Delta = (0.1, -0.3 | 0), rho = (e^0.1, e^-0.3, 1)."""
    rollout = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    train = rollout + torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64)
    got = metrics(train, rollout, torch.ones(3), torch.tensor([0, 0, 1]), buckets=False)
    rho = [math.exp(0.1), math.exp(-0.3), 1.0]
    expected = {
        "num_tokens": 3,
        "nonfinite_tokens": 0,
        "k1": 0.2 / 3,  # mean of -Delta: the rollout is more confident by 0.0667 nats
        "k2": (0.01 + 0.09) / 6,
        "k3": (rho[0] - 1.1 + rho[1] - 0.7) / 3,
        "mean_abs": 0.4 / 3,
        "max_abs": 0.3,
        "p99_abs": 0.3,
        "bit_equal_share": 1 / 3,
        "train_higher_share": 1 / 3,
        "ppl_ratio": (math.exp(0.1) + 1) / 2,  # response 0: mean Delta = -0.1
        "chi2": (math.exp(0.2) + math.exp(-0.6) + 1) / 3 - 1,
        "chi2_sequence": (math.exp(-0.4) - 1) / 2,  # response 0: sum Delta = -0.2
        "ess": sum(rho) ** 2 / (3 * sum(r * r for r in rho)),
        "multiplicative_error": (math.exp(0.1) + math.exp(0.3) + 1) / 3,
        "pearson": statistics.correlation(
            [math.exp(-0.9), math.exp(-2.3), math.exp(-0.5)], [math.exp(-1.0), math.exp(-2.0), math.exp(-0.5)]
        ),
    }
    assert got == pytest.approx(expected, rel=1e-12)
    assert set(got) == NAMES


@given(data=st.data())
@examples(80)
def test_every_metric_equals_the_plain_python_definition(data: st.DataObject) -> None:
    """Random tokens, Delta from 1e-7 to 30 nats, random masks with NaN under them, any order of responses."""
    n = data.draw(st.integers(1, 12))
    logs = st.floats(-30, 0, width=32)
    small = st.floats(-0.125, 0.125, width=32)
    rollout = data.draw(st.lists(logs, min_size=n, max_size=n))
    shift = data.draw(st.lists(st.one_of(st.just(0.0), small, logs), min_size=n, max_size=n))
    train = as_fp32([min(0.0, r + s) for r, s in zip(rollout, shift, strict=True)])
    ids = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    kept = [i for i, m in enumerate(mask) if m]
    hidden = ~torch.tensor(mask)
    t, r = torch.tensor(train), torch.tensor(rollout)
    t[hidden], r[hidden] = math.nan, math.inf
    got = metrics(t, r, torch.tensor(mask), torch.tensor(ids), buckets=False)
    if not kept:
        assert got == {"num_tokens": 0.0, "nonfinite_tokens": 0.0}
        return
    expected = reference([train[i] for i in kept], [rollout[i] for i in kept], [ids[i] for i in kept])
    if "pearson" in got and "pearson" in expected:
        assert got.pop("pearson") == pytest.approx(expected.pop("pearson"), abs=1e-6)
    got.pop("pearson", None), expected.pop("pearson", None)  # exp of two tiny values may or may not coincide
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-13)


@given(seed=st.integers(0, 2**20), n=st.integers(2, 200))
@examples(20)
def test_order_of_tokens_does_not_matter(seed: int, n: int) -> None:
    """A permutation of tokens (with their responses) changes nothing but the order of fp64 additions."""
    g = torch.Generator().manual_seed(seed)
    rollout = -5 * torch.rand(n, generator=g)
    train = (rollout + 0.1 * torch.randn(n, generator=g)).clamp(max=0)
    ids, mask = torch.randint(0, 4, (n,), generator=g), torch.rand(n, generator=g) < 0.8
    positions = torch.randint(0, 3000, (n,), generator=g)
    order = torch.randperm(n, generator=g)
    a = metrics(train, rollout, mask, ids, positions=positions)
    b = metrics(train[order], rollout[order], mask[order], ids[order], positions=positions[order])
    assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def test_equal_sides() -> None:
    """Same bits: every metric is the value the table promises, exactly."""
    logp = torch.tensor([-0.1, -2.0, -7.5, 0.0])
    got = metrics(logp, logp.clone(), torch.ones(4), torch.tensor([0, 0, 1, 1]), buckets=False)
    promised = {m.name: float(m.equal) for m in METRICS if m.equal != "n"}
    assert got.pop("num_tokens") == 4
    assert got.pop("pearson") == pytest.approx(promised.pop("pearson"), abs=1e-15)
    assert got == promised


def test_one_ulp_is_seen_everywhere_it_should_be() -> None:
    """One bit in one of four tokens: bit_equal_share 0.75, and k3 = Delta^2 / 2 is not lost to rounding."""
    rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    train = rollout.clone()
    train[2] = torch.nextafter(train[2], torch.tensor(0.0))
    got = metrics(train, rollout, torch.ones(4))
    ulp = 2.0**-24
    assert got["bit_equal_share"] == 0.75
    assert got["max_abs"] == ulp
    assert got["k3"] == pytest.approx(ulp**2 / 8, rel=1e-6)
    assert got["k1"] == -ulp / 4  # the trainer is higher, so -Delta is negative


def test_empty_mask_gives_counts_only() -> None:
    """No token: no NaN, no crash, nothing but the two counts (verl #5859 crashed, Pearson was NaN)."""
    for mask in (torch.zeros(3), torch.zeros(3, dtype=torch.bool)):
        got = metrics(torch.full((3,), math.nan), torch.zeros(3), mask, torch.arange(3))
        assert got == {"num_tokens": 0.0, "nonfinite_tokens": 0.0}
    empty = torch.zeros(0)
    assert metrics(empty, empty, empty, empty.long()) == {"num_tokens": 0.0, "nonfinite_tokens": 0.0}


def test_single_token() -> None:
    """One token has everything but a correlation."""
    got = metrics(
        torch.tensor([-1.5]), torch.tensor([-1.0]), torch.ones(1), torch.zeros(1).long(), buckets=False
    )
    assert set(got) == NAMES - {"pearson"}
    assert got["p99_abs"] == got["max_abs"] == 0.5
    assert got["ess"] == 1.0


def test_constant_probabilities_have_no_correlation() -> None:
    """Zero variance on one side is 0/0: the key is absent, not NaN."""
    got = metrics(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), torch.ones(2))
    assert "pearson" not in got
    assert all(math.isfinite(v) for v in got.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_tokens_are_dropped_and_counted(bad: float, side: int) -> None:
    """NaN or infinity on either side takes the token out and is counted; the others keep their values."""
    pair = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -3.0])]
    clean = metrics(pair[0][:2], pair[1][:2], torch.ones(2), torch.zeros(2).long())
    pair[side][2] = bad
    got = metrics(pair[0], pair[1], torch.ones(3), torch.zeros(3).long())
    assert got.pop("nonfinite_tokens") == 1.0
    clean.pop("nonfinite_tokens")
    assert got == clean


def test_extreme_differences_stay_finite() -> None:
    """300 nats apart in both directions: ratios count as e^+-20, |Delta| is reported as it is."""
    one_sided = metrics(torch.tensor([-900.0, 0.0]), torch.tensor([0.0, 0.0]), torch.ones(2))
    assert one_sided["ppl_ratio"] == pytest.approx(math.exp(20), rel=1e-12)  # mean Delta is -450
    got = metrics(
        torch.tensor([-300.0, 0.0]), torch.tensor([0.0, -300.0]), torch.ones(2), torch.zeros(2).long()
    )
    assert all(math.isfinite(v) for v in got.values())
    assert got["max_abs"] == 300.0
    assert got["k3"] == pytest.approx((math.exp(20) - 21 + math.exp(-20) + 19) / 2, rel=1e-12)
    assert got["multiplicative_error"] == pytest.approx(math.exp(20), rel=1e-12)


def test_p99_is_the_hundredth_largest_of_ten_thousand() -> None:
    """|Delta| = 1..10000 (times 1e-4): ceil(0.99 n) = 9900, no interpolation, any size (torch.quantile
    stops at 16 M)."""
    delta = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).double().add(1).mul(1e-4)
    rollout = torch.full((10_000,), -2.0, dtype=torch.float64)
    got = metrics(rollout - delta, rollout, torch.ones(10_000), buckets=False)
    assert got["p99_abs"] == pytest.approx(0.99, rel=1e-12)


def test_token_mean_is_not_the_mean_of_response_means() -> None:
    """A one-token response with Delta 1 and a nine-token one with 0: mean over tokens 0.1, never 0.5."""
    rollout = torch.full((10,), -2.0)
    train = rollout.clone()
    train[0] += 1
    got = metrics(train, rollout, torch.ones(10), torch.tensor([0] + [1] * 9))
    assert got["mean_abs"] == pytest.approx(0.1)


def test_positions_count_trained_tokens_per_response() -> None:
    """Prompt and tool tokens do not count; responses may be interleaved."""
    ids = torch.tensor([1, 0, 1, 0, 1, 0])
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    got = response_positions(mask, ids)
    assert got[mask.bool()].tolist() == [0, 0, 1, 1, 2]


def test_position_buckets() -> None:
    """40 tokens of one response, Delta = 1 from position 32 on: bucket 0-31 is clean, 32-127 is not, others
    absent."""
    rollout = torch.full((40,), -2.0)
    train = rollout + (torch.arange(40) >= 32)
    got = metrics(train, rollout, torch.ones(40), torch.zeros(40).long())
    assert got["by_position/0-31/max_abs"] == 0.0
    assert got["by_position/0-31/bit_equal_share"] == 1.0
    assert got["by_position/0-31/num_tokens"] == 32
    assert got["by_position/32-127/mean_abs"] == 1.0
    assert got["by_position/32-127/k1"] == -1.0
    assert not any("128-511" in key for key in got)
    far = metrics(train, rollout, torch.ones(40), positions=torch.full((40,), 40_000))
    assert far["by_position/32768+/num_tokens"] == 40


def test_probability_buckets() -> None:
    """Tenths of exp(rollout_logp): 0.05 -> 0.0-0.1, 0.55 -> 0.5-0.6, 1.0 -> 0.9-1.0."""
    rollout = torch.tensor([0.05, 0.55, 1.0]).log()
    train = rollout - torch.tensor([0.3, 0.2, 0.1])
    got = metrics(train, rollout, torch.ones(3))
    seen = {k: v for k, v in got.items() if k.startswith("by_probability/") and k.endswith("/max_abs")}
    assert seen == pytest.approx(
        {
            "by_probability/0.0-0.1/max_abs": 0.3,
            "by_probability/0.5-0.6/max_abs": 0.2,
            "by_probability/0.9-1.0/max_abs": 0.1,
        },
        rel=1e-5,
    )


@given(seed=st.integers(0, 2**20))
@examples(20)
def test_buckets_add_up_to_the_whole(seed: int) -> None:
    """In every family, token-weighted bucket means give the overall means, and the largest max is the max."""
    g = torch.Generator().manual_seed(seed)
    rollout = -4 * torch.rand(500, generator=g)
    train = (rollout + 0.1 * torch.randn(500, generator=g)).clamp(max=0)
    ids = torch.arange(500) // 125
    got = metrics(train, rollout, torch.rand(500, generator=g) < 0.7, ids)
    for family in ("by_position", "by_probability"):
        buckets = sorted({key.split("/")[1] for key in got if key.startswith(family)})
        count = {b: got[f"{family}/{b}/num_tokens"] for b in buckets}
        assert sum(count.values()) == got["num_tokens"]
        assert max(got[f"{family}/{b}/max_abs"] for b in buckets) == got["max_abs"]
        for name in set(BUCKETED) - {"num_tokens", "max_abs"}:
            mean = sum(got[f"{family}/{b}/{name}"] * count[b] for b in buckets) / got["num_tokens"]
            assert mean == pytest.approx(got[name], rel=1e-9, abs=1e-12)


def test_what_cannot_be_log_probabilities_is_refused() -> None:
    """Logits, half precision, padded or mismatched shapes: named, all at once."""
    good = torch.tensor([-1.0, -2.0])
    with pytest.raises(MismatchInputError, match=r"largest value is 7.*log-softmax"):
        metrics(torch.tensor([7.0, -1.0]), good, torch.ones(2))
    with pytest.raises(MismatchInputError, match=r"(?s)rollout_logp is torch.bfloat16"):
        metrics(good, good.bfloat16(), torch.ones(2))
    with pytest.raises(MismatchInputError, match=r"(?s)mask \(3,\).*train_logp is torch.float16"):
        metrics(good.half(), good, torch.ones(3))
    with pytest.raises(MismatchInputError, match="must be packed"):
        metrics(good[None], good[None], torch.ones(1, 2))


def test_rounding_above_zero_is_accepted() -> None:
    """An unfused log-softmax may return +1e-6 for a sure token (maxtext#5231): compared, not refused."""
    got = metrics(torch.tensor([1e-6, -1.0]), torch.tensor([0.0, -1.0]), torch.ones(2))
    assert got["max_abs"] == pytest.approx(1e-6, rel=1e-6)
