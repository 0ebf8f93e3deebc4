"""What the policy says about corrections and clip calibration is what the algorithm does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from precision_policies import load_policy
from rllib_llm import metric_names as names

Make = Callable[..., Any]


def policy(base: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A shipped policy with some sections' entries replaced."""
    tree = load_policy(base).to_dict()
    for section, values in sections.items():
        tree[section] |= values
    return tree


def test_a_correction_that_waits_for_the_guard_acts_once_it_has_fired(build: Make, toy_config: Make) -> None:
    """`when: guard`, patience 2: uncorrected in iterations 1 and 2, corrected (with the policy's kind) from 3 on."""
    waiting = policy(
        "mixed-bf16-fp8",
        correction={"kind": "mis_token", "lower": 0.5, "upper": 1.5, "when": "guard"},
        guard={"action": "correct", "metric": "max_abs", "tolerance": 0.0, "patience": 2},
    )
    algo = build(toy_config(waiting))
    active = [algo.train()[names.PRECISION][names.CORRECTION_ACTIVE] for _ in range(3)]
    assert active == [0.0, 0.0, 1.0]
    forced = algo.forced_correction
    assert (forced.kind, forced.lower, forced.upper) == ("mis_token", 0.5, 1.5)


@pytest.mark.parametrize(("base", "wider"), [("mixed-bf16-fp8", True), ("unified-fp8", False)])
def test_clip_calibration_widens_the_range_by_the_measured_noise(
    build: Make, toy_config: Make, base: str, wider: bool
) -> None:
    """Noise between the sides widens 0.2 / 0.2; bit-equal sides leave it exactly; off, it is not reported."""
    on = policy(base, clip_calibration={"enabled": True, "strength": 2.0})
    metrics = build(toy_config(on).training(num_epochs=2)).train()[names.LEARNERS]["default_policy"]
    assert (metrics[names.CLIP_LOW] > 0.2) == (metrics[names.CLIP_HIGH] > 0.2) == wider
    if not wider:
        assert (metrics[names.CLIP_LOW], metrics[names.CLIP_HIGH]) == (0.2, 0.2)
    off = build(toy_config(base).training(num_epochs=2)).train()[names.LEARNERS]["default_policy"]
    assert names.CLIP_LOW not in off


# REINFORCE++ normalises over tokens when learners put the KL in and over responses else, hence its own baseline
@pytest.mark.parametrize(("loss", "baseline"), [("grpo", 0.0), ("reinforce++", 1e-9)])
def test_kl_as_reward_changes_the_update_only_once_the_policy_has_moved(
    build: Make, toy_config: Make, loss: str, baseline: float
) -> None:
    """The KL to the initial weights is 0 in the first iteration, so the update equals the one without it; later not."""

    def run(kl_coeff: float) -> list[dict[str, float]]:
        config = toy_config().training(loss=loss, num_epochs=2, lr=1e-2, kl_coeff=kl_coeff, kl_in="reward")
        algo = build(config.training(kl_estimator="k1"))
        return [algo.train()[names.LEARNERS]["default_policy"] for _ in range(3)]

    plain, shaped = run(baseline), run(5.0)
    assert plain[0][names.GRAD_NORM] == pytest.approx(shaped[0][names.GRAD_NORM], rel=1e-5)
    assert plain[2][names.GRAD_NORM] != pytest.approx(shaped[2][names.GRAD_NORM], rel=1e-3)
    assert shaped[2][names.KL_REFERENCE] > 0


def test_a_divisor_of_kept_tokens_changes_nothing_when_all_are_kept(build: Make, toy_config: Make) -> None:
    """A gate that keeps every answer gives the update without a correction, to the last bit, also of micro-batches."""

    def norms(correction: dict[str, Any]) -> list[float]:
        config = toy_config().training(correction=correction, num_epochs=2, micro_batch_tokens=64)
        algo = build(config)
        return [algo.train()[names.LEARNERS]["default_policy"][names.GRAD_NORM] for _ in range(2)]

    gate = {"kind": "geometric_mask", "lower": 1e-6, "upper": 1e6}
    assert norms({"kind": "none"}) == norms({"kind": "none", "gate": gate, "divisor": "kept"})


def test_an_update_whose_every_answer_is_rejected_is_no_step(build: Make, toy_config: Make) -> None:
    """Nothing kept: no division by zero and no step, and training goes on."""
    gate = {"kind": "product_mask", "lower": 2.0, "upper": 3.0}
    algo = build(toy_config().training(correction={"kind": "none", "gate": gate, "divisor": "kept"}))
    for _ in range(2):
        metrics = algo.train()[names.LEARNERS]["default_policy"]
        assert metrics[names.NUM_OPTIMIZER_STEPS] == 0


@pytest.mark.parametrize(
    "correction",
    [
        {"kind": "none", "gate": {"kind": "icepop", "lower": 0.5, "upper": 2.0}},
        {"kind": "none", "gate": {"kind": "geometric_mask", "lower": 2.0, "upper": 0.5}},
        {"kind": "none", "gate": {"kind": "geometric_mask", "upper": 0.5}},
        {"kind": "none", "gate": "geometric_mask"},
        {"kind": "none", "divisor": "some"},
    ],
)
def test_a_gate_that_is_none_is_refused(toy_config: Make, correction: dict[str, Any]) -> None:
    """The message names the key of the gate or the divisor."""
    with pytest.raises(ValueError, match=r"correction\.(gate|divisor)"):
        toy_config().training(correction=correction).validate()
