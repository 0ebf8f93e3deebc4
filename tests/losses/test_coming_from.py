"""docs/coming_from.md, line by line: formulas of TRL, verl and OpenRLHF, written here independently, against ours."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from rllib_llm.losses import LOSSES, LossInputs, make_loss, overlong_penalty
from rllib_llm.losses.advantages import group_advantages
from rllib_llm.losses.chosen import SCALED, advantage_kind, loss_violations
from rllib_llm.losses.corrections import Correction, Gate, correction_violations, correction_weights
from rllib_llm.settings.groups import RolloutSettings, TrainSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
LENGTHS = [3, 7, 1, 5]


def batch(seed: int = 0, spread: float = 0.3):
    """Four answers of different lengths: (log-probs with grad, arguments of LossInputs)."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(n, generator=g) * 3
    logp = (old + spread * torch.randn(n, generator=g)).requires_grad_()
    advantage = torch.randn(len(LENGTHS), generator=g)
    rollout = old + 0.3 * torch.randn(n, generator=g)
    return logp, {
        "old_logp": old,
        "rollout_logp": rollout,
        "advantages": advantage[ids],
        "mask": torch.ones(n, dtype=torch.bool),
        "sequence_ids": ids,
        "num_sequences": len(LENGTHS),
    }


def ours(name, logp, arguments, correction=None, **config):
    """Value and gradient of the update: the sum divided by the count, as the learner does."""
    loss, arguments = make_loss(name, max_tokens=10, **config), dict(arguments)
    if correction is not None:
        weights, _ = correction_weights(
            correction,
            arguments["old_logp"],
            arguments["rollout_logp"],
            arguments["mask"],
            arguments["sequence_ids"],
        )
        arguments["correction_weights"] = weights
        if correction.divisor == "kept":
            arguments["mask"] = arguments["mask"] & (weights != 0)
    out = loss(LossInputs(logp=logp, **arguments))
    value = out.loss_sum / loss.count(
        arguments["mask"], arguments["sequence_ids"], arguments["num_sequences"]
    )
    return value.detach(), torch.autograd.grad(value, logp)[0]


def surrogate(logp, arguments, low=0.2, high=0.2, dual=None):
    """PPO's clipped term per token, from its definition."""
    terms = []
    for t in range(len(logp)):
        ratio, a = torch.exp(logp[t] - arguments["old_logp"][t]), arguments["advantages"][t]
        term = torch.min(ratio * a, torch.clip(ratio, 1 - low, 1 + high) * a)
        if dual is not None and a < 0:
            term = torch.max(term, dual * a)
        terms.append(-term)
    return torch.stack(terms)


def rows(arguments):
    return [(arguments["sequence_ids"] == i).nonzero().flatten() for i in range(arguments["num_sequences"])]


def same(mine, theirs, logp):
    value, gradient = mine
    torch.testing.assert_close(value, theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, logp)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_token_mean(seed):
    """TRL loss_type dapo, verl loss_agg_mode token-mean, OpenRLHF: loss="dapo" with clip_high 0.2."""
    logp, a = batch(seed)
    same(ours("dapo", logp, a, clip_high=0.2), surrogate(logp, a).mean(), logp)


@pytest.mark.parametrize("seed", range(5))
def test_sequence_mean_of_token_mean(seed):
    """TRL loss_type grpo, verl seq-mean-token-mean: loss="grpo"."""
    logp, a = batch(seed)
    terms = surrogate(logp, a)
    same(ours("grpo", logp, a), torch.stack([terms[r].mean() for r in rows(a)]).mean(), logp)


@pytest.mark.parametrize("seed", range(5))
def test_constant_divisor(seed):
    """TRL loss_type dr_grpo divides by answers times the longest; verl's sum-norm by the longest only."""
    logp, a = batch(seed)
    total = surrogate(logp, a).sum()
    same(ours("dr_grpo", logp, a), total / (len(LENGTHS) * 10), logp)
    verl = total / 10
    assert float(ours("dr_grpo", logp, a)[0]) * len(LENGTHS) == pytest.approx(float(verl), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_dual_clip(seed):
    """verl's clip_ratio_c = 3 and TRL's delta: loss_config={"dual_clip": 3.0}."""
    logp, a = batch(seed, spread=2.0)
    same(ours("dapo", logp, a, clip_high=0.2, dual_clip=3.0), surrogate(logp, a, dual=3.0).mean(), logp)


@pytest.mark.parametrize("seed", range(5))
def test_gspo(seed):
    """TRL importance_sampling_level="sequence", verl gspo: loss="gspo"."""
    logp, a = batch(seed, spread=1e-4)
    total = 0.0
    for r in rows(a):
        log_ratio = (logp[r] - a["old_logp"][r]).mean()
        ratio, advantage = torch.exp(log_ratio), a["advantages"][r[0]]
        total = total - torch.min(ratio * advantage, torch.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage)
    same(ours("gspo", logp, a), total / len(LENGTHS), logp)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("lengths", [[100], [100, 3], [1, 1, 50]])
def test_entropy_and_kl_are_nats_per_token_for_every_loss(name, lengths):
    """TRL's and verl's coefficients mean the same here: tokens of 2 nats each give 2.0 times the weight."""
    n = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    logp, zero = torch.full((n,), -1.0, requires_grad=True), torch.zeros(n)
    entropy = torch.full((n,), 2.0, requires_grad=True)
    inputs = LossInputs(
        logp=logp, old_logp=logp.detach(), rollout_logp=logp.detach(), advantages=zero,
        mask=torch.ones(n, dtype=torch.bool), sequence_ids=ids, num_sequences=len(lengths),
        ref_logp=torch.full((n,), -3.0), entropy=entropy,
    )  # fmt: skip
    for config, expected in (({"entropy_coeff": 1.0}, -2.0), ({"kl_coeff": 1.0, "kl_estimator": "k2"}, 2.0)):
        loss = make_loss(name, max_tokens=1000, **config)
        value = loss(inputs).loss_sum / loss.count(inputs.mask, ids, len(lengths))
        assert float(value.detach()) == pytest.approx(expected, rel=1e-5)


def test_group_scaling():
    """scale_rewards group (TRL adds 1e-4 to the deviation, verl and ours 1e-6), batch and none."""
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.3, 0.2, 0.9]), torch.tensor([0, 0, 0, 1, 1, 1])
    parts = [rewards[groups == i] for i in (0, 1)]
    centred = torch.cat([p - p.mean() for p in parts])
    deviation = torch.cat([p.std().repeat(3) for p in parts])
    expected = {
        "group": centred / (deviation + 1e-6),
        "batch": centred / (rewards.std() + 1e-6),
        "none": centred,
    }
    for name, value in expected.items():
        kind = advantage_kind(TrainSettings(scale_rewards=name))
        assert kind == SCALED[name]
        torch.testing.assert_close(group_advantages(rewards, groups, kind), value, rtol=1e-5, atol=1e-6)
    trl = centred / (deviation + 1e-4)
    difference = (trl - expected["group"]).abs().max()
    assert 0 < difference < 1e-3
    assert loss_violations(TrainSettings(scale_rewards="batch", advantages="rloo"), RolloutSettings())


def test_thresholds_of_verl_bound_the_inverse_ratio():
    """verl's k1 bounds [0.5, 5] keep ratios in [0.2, 2]: lower = 1 / their upper, upper = 1 / their lower."""
    d = torch.linspace(-3, 3, 61)
    kept_by_verl = (torch.exp(-d) >= 0.5) & (torch.exp(-d) <= 5.0)
    weights, _ = correction_weights(
        Correction("icepop", 1 / 5.0, 1 / 0.5),
        d,
        torch.zeros(61),
        torch.ones(61, dtype=torch.bool),
        torch.arange(61),
    )
    edge = (d - math.log(2)).abs().minimum((d + math.log(5)).abs()) < 1e-6
    assert ((weights != 0) == kept_by_verl)[~edge].all()


def test_rejected_tokens_leave_the_divisor_with_kept():
    """One of two answers rejected: -0.25 per kept token with divisor all (TRL, OpenRLHF), -0.5 with kept (verl)."""
    logp = torch.full((4,), -1.0, requires_grad=True)
    a = {
        "old_logp": logp.detach().clone(), "rollout_logp": torch.tensor([-1.0, -1.0, -2.0, -2.0]),
        "advantages": torch.ones(4), "mask": torch.ones(4, dtype=torch.bool),
        "sequence_ids": torch.tensor([0, 0, 1, 1]), "num_sequences": 2,
    }  # fmt: skip
    for name in ("dapo", "grpo"):
        for divisor, expected in (("all", -0.25), ("kept", -0.5)):
            _, gradient = ours(name, logp, a, Correction("geometric_mask", 0.99, 1.01, divisor=divisor))
            torch.testing.assert_close(gradient, torch.tensor([expected, expected, 0.0, 0.0]))


def test_a_gate_combines_with_token_weights():
    """verl's rollout_is="token" with rollout_rs="sequence", OpenRLHF's seq-mask-tis: tis of kept answers."""
    old, rollout = torch.tensor([0.0, 0.5, 2.0, 2.0]), torch.zeros(4)
    ids, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    correction = Correction("tis_token", upper=1.2, gate=Gate("geometric_mask", 0.5, 2.0))
    weights, metrics = correction_weights(correction, old, rollout, mask, ids)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.2, 0.0, 0.0]))
    assert metrics["zero_fraction"] == 0.5
    assert correction_violations(correction) == []
    bad = Correction("tis_token", upper=2.0, gate=Gate("icepop", 3.0, 2.0), divisor="some")
    assert len(correction_violations(bad)) == 2


def test_overlong_penalty():
    """TRL's and verl's soft overlong punishment: 0, then linear to -1 at the longest answer."""
    lengths = torch.arange(70, 110)
    expected = torch.tensor(
        [0.0 if n <= 80 else -1.0 if n > 100 else -(n - 80) / 20 for n in lengths.tolist()]
    )
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 1.0).float(), expected)


def test_defaults_of_the_page_are_the_defaults():
    """Each default that the page gives as ours is read from the settings."""
    stated = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", PAGE, re.MULTILINE))
    grpo, rollout = TrainSettings(), RolloutSettings()
    actual = {
        "train.betas": f"{grpo.betas[0]}, {grpo.betas[1]}", "train.weight_decay": grpo.weight_decay,
        "train.loss": grpo.loss, "train.kl_coeff": grpo.kl_coeff, "train.entropy_coeff": grpo.entropy_coeff,
        "rollout.group_size": rollout.group_size, "rollout.max_new_tokens": rollout.max_new_tokens,
        "rollout.temperature": rollout.temperature,
    }  # fmt: skip
    assert {key: str(value) for key, value in actual.items()} == {key: stated.get(key) for key in actual}


def test_every_line_of_the_page_names_its_test():
    """The last column of the tables is a test of this file."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    here = {name for name in globals() if name.startswith("test_")}
    assert named == here - {
        "test_every_line_of_the_page_names_its_test",
        "test_defaults_of_the_page_are_the_defaults",
    }
