"""Temperature and truncation: the right value when both sides agree, a visible error or a refusal when not."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.mismatch import MismatchInputError, metrics, require_comparable_sampling

N, V = 400, 50


def logits_and_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, V, generator=g)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=g)
    return logits, tokens


def picked(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)


def test_equal_temperature_on_both_sides_is_no_mismatch() -> None:
    """T = 0.6 on both sides: exactly zero."""
    logits, tokens = logits_and_tokens()
    got = metrics(picked(logits / 0.6, tokens), picked(logits / 0.6, tokens), torch.ones(N))
    assert got["max_abs"] == 0.0
    assert got["bit_equal_share"] == 1.0


def test_temperature_on_one_side_only_is_loud() -> None:
    """T = 0.6 in the engine, raw log-probs in the trainer (trl#4159): k3 above 0.05, far beyond any
    rounding."""
    logits, tokens = logits_and_tokens()
    got = metrics(picked(logits, tokens), picked(logits / 0.6, tokens), torch.ones(N))
    assert got["k3"] > 0.05
    assert got["bit_equal_share"] == 0.0


def test_truncation_renormalised_on_one_side_shifts_every_ratio_by_the_kept_mass() -> None:
    """top-k 5 renormalised by the engine only: Delta = log of the kept mass on every token, all <= 0
    (trl#6789)."""
    logits, _ = logits_and_tokens()
    kept = logits.topk(5).indices
    cut = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    tokens = torch.multinomial(cut.softmax(-1), 1, generator=torch.Generator().manual_seed(1))
    mass = logits.softmax(-1).gather(1, kept).sum(-1).log().mean()
    got = metrics(picked(logits, tokens), picked(cut, tokens), torch.ones(N))
    assert got["k1"] == pytest.approx(-mass.item(), rel=1e-4)
    assert got["train_higher_share"] == 0.0
    both = metrics(picked(cut, tokens), picked(cut, tokens), torch.ones(N))
    assert both["max_abs"] == 0.0


def test_a_token_outside_the_trainers_truncation_is_dropped_and_counted() -> None:
    """Both sides renormalise but keep different sets: log-prob -inf in the trainer, one token, counted."""
    train, rollout = torch.tensor([-torch.inf, -1.0]), torch.tensor([-3.0, -1.0])
    got = metrics(train, rollout, torch.ones(2))
    assert (got["num_tokens"], got["nonfinite_tokens"]) == (1.0, 1.0)


@pytest.mark.parametrize("settings", [{}, {"top_p": 1.0, "top_k": 0}, {"top_k": -1}, {"temperature": 0.6}])
def test_untruncated_sampling_is_accepted(settings: dict) -> None:
    """Any positive temperature, no truncation."""
    require_comparable_sampling(**({"temperature": 1.0} | settings))


def test_truncated_sampling_follows_the_policy() -> None:
    """ "refuse" names rollout.top_p and the policy key; "renormalise" lets it pass."""
    with pytest.raises(
        MismatchInputError, match=r"rollout.top_p = 0.9.*policy.logprobs.truncation = 'refuse'"
    ):
        require_comparable_sampling(temperature=1.0, top_p=0.9)
    with pytest.raises(MismatchInputError, match=r"rollout.top_k = 20"):
        require_comparable_sampling(temperature=1.0, top_k=20)
    require_comparable_sampling(temperature=1.0, top_p=0.9, top_k=20, truncation="renormalise")


def test_everything_wrong_is_listed_at_once() -> None:
    """Greedy decoding, an impossible top_p and an unknown truncation in one message."""
    with pytest.raises(MismatchInputError, match=r"(?s)temperature = 0.*top_p = 1.5.*truncation = 'ignore'"):
        require_comparable_sampling(temperature=0, top_p=1.5, truncation="ignore")
