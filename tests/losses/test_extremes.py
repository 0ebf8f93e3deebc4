"""Values at extreme ratios: finite losses and gradients, with the stated bound."""

from __future__ import annotations

import math

import pytest
import torch

from rllib_llm.losses import LOSSES, make_loss
from rllib_llm.losses.terms import LOG_RATIO_BOUND, bounded_exp, kl_estimate
from tests.losses.batches import Response, pack

NAMES = sorted(LOSSES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("difference", [-800.0, -89.0, -20.0, 20.0, 89.0, 800.0])
def test_any_log_ratio_gives_finite_loss_and_gradient(name: str, advantage: float, difference: float) -> None:
    """exp overflows fp32 at 88.7; with log-ratios to +-800 everything stays finite and within |A| e^20
    |logp|."""
    old = -1000.0
    batch = [Response([old + difference] * 3, [old] * 3, [True] * 3, advantage)]
    inputs = pack(batch, extras=False)
    out = make_loss(name, max_tokens=5)(inputs)
    out.loss_sum.backward()
    assert torch.isfinite(inputs.logp.grad).all()
    assert abs(out.loss_sum.item()) <= 1.01 * 3 * math.exp(LOG_RATIO_BOUND) * 2000
    assert all(math.isfinite(total.item()) for total, _ in out.metrics.values())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_kl_estimators_are_bounded(kind: str, gap: float) -> None:
    """A reference 500 nats away counts as 20 nats away, with zero gradient beyond."""
    logp = torch.tensor([-600.0], requires_grad=True)
    value = kl_estimate(logp, torch.tensor([-600.0 + gap]), kind)
    value.sum().backward()
    d = math.copysign(LOG_RATIO_BOUND, gap)
    assert value.item() == pytest.approx({"k1": -d, "k2": 200.0, "k3": math.expm1(d) - d}[kind], rel=1e-6)
    assert logp.grad.item() == 0.0


def test_small_differences_keep_their_digits() -> None:
    """k3 of d = 1e-4 is d^2/2 = 5e-9; exp(d) - 1 - d in fp32 would give rounding noise of 1e-7."""
    logp = torch.tensor([-1e-4])
    naive = logp.neg().exp() - 1 + logp
    assert kl_estimate(logp, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=1e-2)
    assert abs(naive.item() - 5e-9) > 5e-9


def test_bounded_exp_at_and_beyond_the_bound() -> None:
    """e^20 at +20 and above, e^-20 at -20 and below, exact exp inside."""
    got = bounded_exp(torch.tensor([-math.inf, -21.0, 0.0, 1.0, 21.0, math.inf])).tolist()
    assert got == pytest.approx(
        [math.exp(-20), math.exp(-20), 1.0, math.e, math.exp(20), math.exp(20)], rel=1e-6
    )


def test_gspo_of_a_long_response_is_length_normalised() -> None:
    """4 000 tokens of log-ratio 0.01 have s = e^0.01 in GSPO (trl#4772 saw e^40 in the product form)."""
    n = 4000
    inputs = pack([Response([-0.99] * n, [-1.0] * n, [True] * n, -1.0)], extras=False)
    out = make_loss("gspo")(inputs)
    total, count = out.metrics["ratio"]
    assert (total / count).item() == pytest.approx(math.exp(0.01), rel=1e-4)
    assert out.loss_sum.item() == pytest.approx(math.exp(0.01), rel=1e-4)
