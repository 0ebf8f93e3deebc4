"""Every algorithm learns the tabular task of `bandit.py`; thresholds come from seeds 0..19 measured on
2026-11-29.

Start 0.140, best 1.0. Each threshold is the lowest of the 20 seeds less 0.05; the tests run three of the
seeds. A gradient of the wrong sign ends below 0.01 and no gradient at 0.140, so a loss that fails to teach
cannot pass.
"""

from __future__ import annotations

import pytest
import torch

from rllib_llm.losses.corrections import Correction
from tests.losses.bandit import LENGTH, PROMPTS, VOCAB, expected_return, train

SEEDS = (0, 1, 2)
START = 0.140
# 20 iterations of 32 responses, two optimiser epochs each; mean (deviation) of 20 seeds in the comment
LOWEST_OF_20_SEEDS = {
    "grpo": 0.904,  # 0.976 (0.024)
    "dr_grpo": 0.900,  # 0.978 (0.019)
    "dapo": 0.879,  # 0.963 (0.036)
    "gspo": 0.917,  # 0.944 (0.013)
    "rloo": 0.973,  # 0.978 (0.003)
    "reinforce++": 0.977,  # 0.986 (0.003)
}


def test_the_start_is_what_the_thresholds_are_compared_with() -> None:
    """A uniform policy earns 0.1404 by the closed formula in bandit.py."""
    uniform = torch.zeros(PROMPTS, LENGTH, VOCAB)
    value = expected_return(uniform, torch.ones(PROMPTS, LENGTH, dtype=torch.int64))
    assert value == pytest.approx((1 / 6 + 5 / 36 + 25 / 216) / 3, rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOWEST_OF_20_SEEDS))
def test_algorithm_learns(name: str) -> None:
    """20 iterations lift the exact expected return from 0.14 to at least the lowest of 20 seeds less 0.05."""
    returns = [train(name, seed, iterations=20) for seed in SEEDS]
    assert min(returns) > LOWEST_OF_20_SEEDS[name] - 0.05


def test_dapo_learns_with_dynamic_sampling() -> None:
    """Groups without contrast dropped (lowest of 20 seeds: 0.886)."""
    assert min(train("dapo", seed, iterations=20, dynamic_sampling=True) for seed in SEEDS) > 0.886 - 0.05


def test_the_task_can_fail() -> None:
    """The same loop with the advantage's sign turned unlearns, and with no advantage stays at the start."""
    assert train("grpo", 0, iterations=20, learning_sign=-1.0) < START / 2
    assert train("grpo", 0, iterations=20, learning_sign=0.0) == pytest.approx(START, abs=1e-3)


@pytest.mark.parametrize(
    ("correction", "lowest"),
    [
        (Correction("tis_token", None, 2.0), 0.845),
        (Correction("tis_sequence", None, 2.0), 0.846),
        (Correction("icepop", 0.5, 5.0), 0.779),
        (Correction("mis_token", None, 2.0), 0.686),
        (Correction("mis_sequence", None, 2.0), 0.611),
        (Correction("geometric_mask", 0.5, 2.0), 0.811),
        (Correction("product_mask", 0.5, 2.0), 0.534),
    ],
)
def test_learns_through_a_correction(correction: Correction, lowest: float) -> None:
    """An engine whose logits are off by N(0, 0.7^2) still teaches through each correction (lowest of 20
    seeds)."""
    returns = [
        train("grpo", seed, iterations=40, epochs=1, rollout_noise=0.7, correction=correction)
        for seed in SEEDS
    ]
    assert min(returns) > lowest - 0.05


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_as_loss_holds_the_policy_near_the_reference(estimator: str) -> None:
    """kl_coeff = 1 against the uniform reference keeps the return below 0.45 (20 seeds: 0.30 .. 0.39)."""
    assert 0.25 < train("grpo", 0, iterations=20, kl_coeff=1.0, kl_estimator=estimator) < 0.45


def test_k1_as_loss_does_not_regularise() -> None:
    """Its expected gradient is zero: the policy learns as without it (20 seeds: >= 0.932). Documented trap."""
    assert train("grpo", 0, iterations=20, kl_coeff=1.0, kl_estimator="k1") > 0.88


def test_entropy_bonus_holds_the_policy_near_uniform() -> None:
    """entropy_coeff = 1 keeps the return below 0.45 (20 seeds: 0.34 .. 0.40)."""
    assert 0.25 < train("grpo", 0, iterations=20, entropy_coeff=1.0) < 0.45
