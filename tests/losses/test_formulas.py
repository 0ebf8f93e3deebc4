"""Each loss against its paper: hand-worked numbers, and an independent float64 implementation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.losses import LOSSES, make_loss
from rllib_llm.losses.terms import kl_estimate
from tests.losses import reference
from tests.losses.batches import Response, batches, pack
from tests.random_examples import examples

NAMES = sorted(LOSSES)


def two_responses() -> list[Response]:
    """Ratios (1.5, 1, 0.5) with A = +1 and (1.5, 0.5) with A = -1; old log-probs are log 0.2."""
    old = math.log(0.2)
    return [
        Response([math.log(0.3), old, math.log(0.1)], [old] * 3, [True] * 3, 1.0),
        Response([math.log(0.3), math.log(0.1)], [old] * 2, [True] * 2, -1.0),
    ]


def per_token_hand() -> tuple[list[float], list[float]]:
    """-min(rA, clip(r)A) by hand with clip 0.2 / 0.2: the upper bound cuts 1.5 for A > 0, the lower 0.5 for
    A < 0."""
    return [-1.2, -1.0, -0.5], [1.5, 0.8]


@pytest.mark.parametrize(
    ("name", "expected", "count"),
    [
        ("grpo", (-1.2 - 1.0 - 0.5) / 3 + (1.5 + 0.8) / 2, 2.0),
        ("reinforce++", (-1.2 - 1.0 - 0.5) / 3 + (1.5 + 0.8) / 2, 2.0),
        ("dr_grpo", -1.2 - 1.0 - 0.5 + 1.5 + 0.8, 2 * 10.0),
        ("dapo", -1.28 - 1.0 - 0.5 + 1.5 + 0.8, 5.0),
        # GSPO: s_1 = (0.75)^(1/3) = 0.90856, s_2 = 0.75^(1/2) = 0.86603; A > 0 keeps s_1, A < 0 is cut at 1 - 3e-4
        ("gspo", -(0.75 ** (1 / 3)) + (1 - 3e-4), 2.0),
        # RLOO: s = 0.75 on both; A > 0 is inside for its sign, A < 0 is below 0.8 and drops out
        ("rloo", -0.75 * (math.log(0.3) + math.log(0.2) + math.log(0.1)), 2.0),
    ],
)
def test_hand_worked_example(name: str, expected: float, count: float) -> None:
    """Two responses of 3 and 2 tokens give the sum and the count one gets with pencil and paper."""
    loss = make_loss(name, max_tokens=10)
    inputs = pack(two_responses(), extras=False)
    out = loss(inputs)
    assert out.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert loss.count(inputs.mask, inputs.sequence_ids, 2).item() == count


def test_hand_worked_clip_fractions() -> None:
    """Of five tokens the upper bound cuts one (A > 0) and the lower bound one (A < 0)."""
    metrics = make_loss("grpo")(pack(two_responses(), extras=False)).metrics
    pairs = {k: (s.item(), n.item()) for k, (s, n) in metrics.items()}
    assert pairs["clip_fraction_high"] == (1.0, 5.0)
    assert pairs["clip_fraction_low"] == (1.0, 5.0)
    assert pairs["clip_fraction"] == (2.0, 5.0)
    assert pairs["ratio"] == pytest.approx((1.5 + 1 + 0.5 + 1.5 + 0.5, 5.0))
    # k3 of KL(old || new) with log-ratios log 1.5 twice, 0, log 0.5 twice
    kl = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    assert pairs["approx_kl"] == pytest.approx((kl, 5.0), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches(), kl=st.sampled_from([0.0, 0.3]), kind=st.sampled_from(["k1", "k2", "k3"]))
@examples(40)
def test_value_and_gradient_equal_the_float64_reference(
    name: str, batch: list[Response], kl: float, kind: str
) -> None:
    """Loss sum, gradient of every token and count equal a loop in Python floats; masked tokens (NaN) get
    zero."""
    expected, gradient, count = reference.loss(name, batch, kl=kl, kind=kind, entropy=0.1)
    low, high = reference.CLIP[name]
    if any(_near_a_bound(name, r, low, high) for r in batch):
        return  # fp32 and fp64 may fall on different sides of the kink
    loss = make_loss(name, kl_coeff=kl, kl_estimator=kind, entropy_coeff=0.1, max_tokens=reference.MAX_TOKENS)
    inputs = pack(batch)
    out = loss(inputs)
    out.loss_sum.backward()
    # fp32 sums of at most 30 terms of size up to ~e^5.5 * 0.3 (k3 of a ref 5.5 nats away)
    scale = max(1.0, max(abs(g) for g in gradient))
    assert out.loss_sum.item() == pytest.approx(expected, abs=2e-5 * scale, rel=1e-4)
    assert inputs.logp.grad.tolist() == pytest.approx(gradient, abs=2e-5 * scale, rel=1e-4)
    assert loss.count(inputs.mask, inputs.sequence_ids, len(batch)).item() == count


def _near_a_bound(name: str, r: Response, low: float, high: float) -> bool:
    d = [r.logp[t] - r.old[t] for t in r.trained]
    if name == "gspo":
        d = [sum(d) / len(d)] if d else []
    if name == "rloo":
        d = [sum(d)]
    return any(abs(math.exp(x) - bound) < 1e-5 for x in d for bound in (1 - low, 1 + high))


@given(d=st.floats(-5, 5), kind=st.sampled_from(["k1", "k2", "k3"]))
@examples(60)
def test_kl_estimators_equal_schulmans_formulas(d: float, kind: str) -> None:
    """k1 = -d, k2 = d^2/2, k3 = e^d - 1 - d with d = log ref - log policy."""
    logp = torch.tensor([-5.5], dtype=torch.float64)
    got = kl_estimate(logp, logp + d, kind).item()
    assert got == pytest.approx({"k1": -d, "k2": d * d / 2, "k3": math.expm1(d) - d}[kind], abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_estimators_average_to_the_kl(kind: str) -> None:
    """Summed over the whole distribution, k1 and k3 give KL(policy || reference) exactly; this is no
    sampling test."""
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact, rel=1e-12)


def test_gradient_of_k2_is_the_gradient_of_the_kl_and_that_of_k1_is_zero() -> None:
    """On-policy, in expectation: k2 as a loss regularises, k1 as a loss does nothing (why docs warn of it)."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.3, 0.3, 0.4]).double().log()

    def gradient(estimator: str) -> torch.Tensor:
        logp = logits.log_softmax(0)
        expectation = (logp.detach().exp() * kl_estimate(logp, ref, estimator)).sum()
        return torch.autograd.grad(expectation, logits)[0]

    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)[0]
    assert torch.allclose(gradient("k2"), exact, atol=1e-12)
    assert torch.allclose(gradient("k1"), torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    """A = -1 at ratio 10 costs 10 without and 3 with dual_clip = 3, whose gradient is zero and counted as
    cut."""
    old = -5.0
    batch = [Response([old + math.log(10)], [old], [True], -1.0)]
    plain = make_loss("dapo")(pack(batch, extras=False))
    inputs = pack(batch, extras=False)
    dual = make_loss("dapo", dual_clip=3.0)(inputs)
    dual.loss_sum.backward()
    assert plain.loss_sum.item() == pytest.approx(10.0, rel=1e-5)
    assert dual.loss_sum.item() == 3.0
    assert inputs.logp.grad.item() == 0.0
    assert dual.metrics["clip_fraction_high"][0].item() == 1.0


def test_gspo_gradient_equals_the_sequence_form() -> None:
    """The token form used in the code has the gradient of the paper's eq. 5 computed by autograd on s_i
    itself."""
    batch = [
        Response([-1.0, -2.0, -0.7], [-1.0001, -2.0, -0.7002], [True] * 3, 1.5),
        Response([-0.3, -0.9], [-0.3, -0.9001], [True, True], -0.5),
    ]
    inputs = pack(batch, extras=False)
    make_loss("gspo")(inputs).loss_sum.backward()
    logp = inputs.logp.detach().double().requires_grad_()
    total = 0.0
    for i, r in enumerate(batch):
        chosen = inputs.sequence_ids == i
        s = (logp[chosen] - inputs.old_logp[chosen].double()).mean().exp()
        total = total - torch.minimum(s * r.advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * r.advantage)
    total.backward()
    assert torch.allclose(inputs.logp.grad.double(), logp.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": -0.1}, "clip_high = -0.1"),
        ({"dual_clip": 0.5}, "dual_clip = 0.5"),
        ({"kl_coeff": -1.0}, "kl_coeff = -1.0"),
        ({"kl_estimator": "k4"}, "kl_estimator = 'k4'"),
        ({"clip": 0.2}, "clip = 0.2"),
    ],
)
def test_bad_settings_are_refused_by_name(config: dict, named: str) -> None:
    """A wrong or unknown setting is named with its value."""
    with pytest.raises(ValueError, match=named):
        make_loss("grpo", **config)


def test_all_bad_settings_are_listed_at_once() -> None:
    """Two errors, one message."""
    with pytest.raises(ValueError, match=r"(?s)clip_low = 2.*dual_clip = 1"):
        make_loss("grpo", clip_low=2, dual_clip=1)
    with pytest.raises(ValueError, match=r"training.loss = 'ppo'.*dapo"):
        make_loss("ppo")
    with pytest.raises(ValueError, match="max_tokens = None"):
        make_loss("dr_grpo")


def test_missing_reference_or_entropy_is_refused() -> None:
    """kl_coeff without ref_logp and entropy_coeff without entropy name the missing field."""
    inputs = pack(two_responses(), extras=False)
    with pytest.raises(ValueError, match=r"kl_coeff = 0.1 needs LossInputs.ref_logp"):
        make_loss("grpo", kl_coeff=0.1)(inputs)
    with pytest.raises(ValueError, match=r"entropy_coeff = 0.1 needs LossInputs.entropy"):
        make_loss("grpo", entropy_coeff=0.1)(inputs)


def test_shapes_are_checked() -> None:
    """A padded [B, L] tensor, or one column of another length, is refused with both shapes."""
    x = pack(two_responses(), extras=False)
    with pytest.raises(ValueError, match=r"old_logp \(4,\)"):
        type(x)(x.logp, x.old_logp[:4], x.rollout_logp, x.advantages, x.mask, x.sequence_ids, 2)


def test_reference_and_entropy_are_measured_without_being_in_the_loss() -> None:
    """With coefficients 0 (say KL in the reward) both metrics appear, and loss and gradient are those without them."""
    batch = two_responses()
    for r in batch:
        r.ref, r.entropy, r.weight = [-1.0] * len(r.mask), [math.inf] * len(r.mask), [1.0] * len(r.mask)
    plain, full = pack(batch, extras=False), pack(batch)
    a, b = make_loss("grpo")(plain), make_loss("grpo")(full)
    b.loss_sum.backward()
    a.loss_sum.backward()
    assert a.loss_sum.item() == b.loss_sum.item()
    assert torch.equal(plain.logp.grad, full.logp.grad)
    assert {"kl_reference", "entropy"} <= set(b.metrics) - set(a.metrics)
