"""Calibrated clipping: noise statistics, the widened range, and the harm it undoes."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rllib_llm.losses import RatioNoise, calibrated, make_loss, noise_sums
from tests.losses.batches import Response, pack

IDS = torch.tensor([0, 0, 1, 1, 1])
TRAIN = torch.tensor([-1.0, -2.0, -1.5, -0.5, -9.0])
DELTA = torch.tensor([0.02, -0.04, 0.06, 0.0, 0.5])
MASK = torch.tensor([1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("level", "values"),
    [
        ("token", [0.02, -0.04, 0.06, 0.0]),
        ("sequence_mean", [-0.01, 0.03]),
        ("sequence_sum", [-0.02, 0.06]),
    ],
)
def test_noise_is_measured_at_the_level_of_the_ratio(level: str, values: list[float]) -> None:
    """Mean and (population) deviation of Delta over trained tokens, or of its mean / sum per response."""
    noise = RatioNoise.from_sums(noise_sums(level, TRAIN, TRAIN - DELTA, MASK, IDS, 2))
    assert noise.count == len(values)
    assert noise.bias == pytest.approx(statistics.mean(values), abs=1e-6)
    assert noise.sigma == pytest.approx(statistics.pstdev(values), abs=1e-6)


def test_noise_sums_add_over_shards() -> None:
    """Two ranks' sums give the noise of the whole batch: what all-reduce does."""
    whole = noise_sums("token", TRAIN, TRAIN - DELTA, MASK, IDS, 2)
    a = noise_sums("token", TRAIN[:2], (TRAIN - DELTA)[:2], MASK[:2], IDS[:2], 1)
    b = noise_sums("token", TRAIN[2:], (TRAIN - DELTA)[2:], MASK[2:], IDS[2:] - 1, 1)
    torch.testing.assert_close(a + b, whole)


def test_non_finite_tokens_and_faults_do_not_widen_the_range_without_limit() -> None:
    """NaN is left out; a Delta of 30 counts as 1; no token at all is no noise."""
    train, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([math.nan, -31.0])
    noise = RatioNoise.from_sums(noise_sums("token", train, rollout, torch.ones(2), torch.zeros(2).long(), 1))
    assert (noise.count, noise.bias, noise.sigma) == (1, 1.0, 0.0)
    empty = RatioNoise.from_sums(
        noise_sums("token", train, rollout, torch.zeros(2), torch.zeros(2).long(), 1)
    )
    assert empty == RatioNoise(0.0, 0.0, 0)


def test_the_calibrated_range_is_the_documented_formula() -> None:
    """bias 0.01, sigma 0.1, strength 2: 1 - low' = 0.8 e^(0.01 - 0.2), 1 + high' = 1.28 e^(0.01 + 0.2)."""
    loss = calibrated(make_loss("dapo"), RatioNoise(0.01, 0.1, 9), 2.0, old_is_rollout=True)
    assert 1 - loss.clip_low == pytest.approx(0.8 * math.exp(-0.19))
    assert 1 + loss.clip_high == pytest.approx(1.28 * math.exp(0.21))
    loss = calibrated(make_loss("dapo"), RatioNoise(0.01, 0.1, 9), 2.0, old_is_rollout=False)
    assert 1 - loss.clip_low == pytest.approx(0.8 * math.exp(-0.2))


def test_no_noise_no_strength_no_change() -> None:
    """Bit-equal sides, or strength 0 without bias, keep the very same loss object."""
    loss = make_loss("grpo")
    assert calibrated(loss, RatioNoise(0.0, 0.0, 100), 3.0, old_is_rollout=True) is loss
    assert calibrated(loss, RatioNoise(0.3, 0.1, 100), 0.0, old_is_rollout=False) is loss
    with pytest.raises(ValueError, match=r"clip_calibration.strength = -1"):
        calibrated(loss, RatioNoise(0.0, 0.0, 1), -1.0, old_is_rollout=True)


def test_the_range_stays_a_range() -> None:
    """Shifts are limited to e^+-0.5 and no end crosses ratio 1, whatever is measured."""
    wide = calibrated(make_loss("grpo"), RatioNoise(0.0, 50.0, 9), 1.0, old_is_rollout=True)
    assert 1 - wide.clip_low == pytest.approx(0.8 * math.exp(-0.5))
    assert 1 + wide.clip_high == pytest.approx(1.2 * math.exp(0.5))
    shifted = calibrated(make_loss("grpo"), RatioNoise(1.0, 0.0, 9), 1.0, old_is_rollout=True)
    assert shifted.clip_low == 0.0
    shifted = calibrated(make_loss("grpo"), RatioNoise(-1.0, 0.0, 9), 1.0, old_is_rollout=True)
    assert shifted.clip_high == 0.0


def test_noise_clips_negative_tokens_and_calibration_gives_them_back() -> None:
    """With a policy that has not moved, noise of sigma 0.25 in the ratio cuts ~19 % of A < 0 tokens at clip
    0.2 (P[n < log 0.8] = Phi(-0.893) = 0.186); with the range calibrated at strength 2, Phi(-2.893) = 0.2 %
    remain."""
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    noise = (0.25 * torch.randn(n, generator=generator)).tolist()
    inputs = pack([Response([-3.0 + e for e in noise], [-3.0] * n, [True] * n, -1.0)], extras=False)
    measured = RatioNoise.from_sums(
        noise_sums("token", inputs.logp.detach(), inputs.rollout_logp, inputs.mask, inputs.sequence_ids, 1)
    )
    plain = make_loss("grpo")
    cut = [
        (loss(inputs).metrics["clip_fraction_low"][0] / n).item()
        for loss in (plain, calibrated(plain, measured, 2.0, old_is_rollout=True))
    ]
    assert cut[0] == pytest.approx(0.186, abs=0.01)
    assert cut[1] == pytest.approx(0.002, abs=0.0015)
