"""The loop in one process: it learns, and reports what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from precision_policies import load_policy
from rllib_llm import metric_names as names
from tests.rllib.toy import AskTwice, CopyDigit, Curriculum

Make = Callable[..., Any]


def test_grpo_learns_to_copy_a_digit(build: Make, toy_config: Make) -> None:
    """The mean return of the toy task rises from chance to above 0.6 in 25 iterations, under FP8 on both sides.

    Threshold: seeds 0, 1, 2 reached 0.76 or more by iteration 25, from 0.09-0.13.
    """
    config = toy_config(group_size=8, prompts_per_iteration=16, max_new_tokens=2).training(lr=2e-3)
    algo = build(config)
    returns = [algo.train()[names.ENV_RUNNERS][names.EPISODE_RETURN_MEAN] for _ in range(25)]
    assert returns[0] < 0.2
    assert np.mean(returns[-5:]) > 0.6


def test_unified_policy_has_no_mismatch_at_all(build: Make) -> None:
    """Under unified-fp8 every sampled token has the same log-probability bits on both sides, after updates too."""
    algo = build()
    for _ in range(3):
        result = algo.train()
        assert result[names.MISMATCH]["bit_equal_share"] == 1.0
        assert result[names.MISMATCH]["max_abs"] == 0.0
        assert result[names.PRECISION][names.CORRECTION_ACTIVE] == 0.0


def test_mixed_policy_shows_its_mismatch_and_corrects_it(build: Make) -> None:
    """Under mixed-bf16-fp8 the mismatch is not zero, is reported, and its correction weights the loss."""
    result = build(policy="mixed-bf16-fp8").train()
    assert result[names.MISMATCH]["max_abs"] > 0.0
    assert result[names.PRECISION][names.CORRECTION_ACTIVE] == 1.0
    assert result[names.CORRECTION]["raw_max"] != 1.0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.8}, {"min_new_tokens": 3},
            {"min_new_tokens": 3, "engine_options": {"eos_token_id": 9}}],
)  # fmt: skip
def test_learner_scores_the_distribution_that_was_sampled(
    build: Make, toy_config: Make, sampling: dict
) -> None:
    """With temperature, truncation or a minimum length, learner and engine give equal log-probability bits."""
    policy = load_policy("unified-fp8").to_dict()
    policy["logprobs"]["truncation"] = "renormalise"
    result = build(toy_config(policy, **sampling)).train()
    assert result[names.MISMATCH]["bit_equal_share"] == 1.0
    assert result[names.MISMATCH]["num_tokens"] > 0


def test_every_documented_metric_is_reported(build: Make) -> None:
    """The constants of metric_names are the keys of a result."""
    algo = build()
    algo.evaluate()
    result = algo.train()
    runner = result[names.ENV_RUNNERS]
    for name in (
        names.EPISODE_RETURN_MEAN, names.RESPONSE_LENGTH_MEAN, names.PROMPT_LENGTH_MEAN, names.TOKENS_PER_S,
        names.NUM_TOKENS_SAMPLED, names.NUM_REWARD_ERRORS, names.TRUNCATED_SHARE, names.SOLVED_SHARE,
        names.NUM_TURNS_MEAN, names.EPISODE_RETURN_MAX, names.EPISODE_RETURN_MIN,
        names.NUM_REWARD_ERRORS_LIFETIME,
    ):  # fmt: skip
        assert np.isfinite(runner[name]), name
    assert set(runner[names.REWARDS]) == {"digit", "stop"}
    learner = result[names.LEARNERS]["default_policy"]
    for name in (
        names.LOSS, names.GRAD_NORM, names.ENTROPY, names.CLIP_FRACTION, names.LEARNING_RATE, names.NUM_TOKENS,
        names.NUM_OPTIMIZER_STEPS, names.NUM_SKIPPED_STEPS, names.NUM_SKIPPED_STEPS_LIFETIME,
        names.NUM_MICRO_BATCHES, names.LOSS_SCALE,
    ):  # fmt: skip
        assert np.isfinite(learner[name]), name
    for name in (
        names.NUM_SAMPLES_REFUSED, names.NUM_PROMPTS_LOST, names.NUM_EMPTY_SAMPLES, names.NUM_SAMPLE_ROUNDS,
        names.NUM_GROUPS_WITHOUT_SIGNAL,
    ):  # fmt: skip
        assert np.isfinite(result[name]), name
    for name in (
        names.SAMPLE_TIMER, names.LEARN_TIMER, names.PUSH_WEIGHTS_TIMER, names.MISMATCH_TIMER, names.ADVANTAGE_TIMER
    ):  # fmt: skip
        assert result[names.TIMERS][name] > 0.0, name
    for name in (names.SAMPLE_TOKENS_PER_S, names.LEARN_TOKENS_PER_S, names.ITERATION_TOKENS_PER_S):
        assert result[names.THROUGHPUT][name] > 0.0, name
    for side in (names.LEARNER, names.ENGINE):
        assert result[names.MEMORY][f"{side}_{names.RSS_PEAK}"] > 0.1, side
    assert result["precision_policy"] == "unified-fp8"
    assert result["precision_fingerprint"] == algo.settings.policy.fingerprint


def test_kl_to_the_frozen_reference_starts_at_zero_and_grows(build: Make, toy_config: Make) -> None:
    """The reference holds the initial weights: KL is exactly 0 before the first update and positive after."""
    algo = build(toy_config().training(kl_coeff=0.1, lr=1e-2))
    first = algo.train()[names.LEARNERS]["default_policy"][names.KL_REFERENCE]
    second = algo.train()[names.LEARNERS]["default_policy"][names.KL_REFERENCE]
    assert first == 0.0
    assert second > 0.0


def test_more_than_one_step_uses_log_probs_of_the_weights_that_sampled(build: Make, toy_config: Make) -> None:
    """With epochs and minibatches the ratio starts at 1 and drifts, the mismatch is still that of the old weights."""
    result = build(toy_config().training(num_epochs=2, minibatches_per_epoch=2, lr=1e-2)).train()
    learner = result[names.LEARNERS]["default_policy"]
    assert learner[names.NUM_OPTIMIZER_STEPS] == 4
    assert learner["approx_kl"] > 0.0
    assert result[names.MISMATCH]["bit_equal_share"] == 1.0


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"])
def test_every_loss_trains(build: Make, toy_config: Make, loss: str) -> None:
    """Each loss by name makes a finite, non-zero gradient step."""
    learner = build(toy_config().training(loss=loss)).train()[names.LEARNERS]["default_policy"]
    assert learner[names.GRAD_NORM] > 0.0
    assert learner[names.NUM_SKIPPED_STEPS] == 0


def test_callbacks_are_made(build: Make, toy_config: Make) -> None:
    """Users' RLlib callbacks see every episode's creation, start and end, and the samples."""
    from ray.rllib.callbacks.callbacks import RLlibCallback

    seen: list[str] = []

    class Recorder(RLlibCallback):
        def on_environment_created(self, **kwargs: Any) -> None:
            seen.append("environment")

        def on_episode_created(self, *, episode: Any, **kwargs: Any) -> None:
            seen.append("created")

        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            seen.append("start")

        def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
            seen.append("step")

        def on_episode_end(self, *, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:
            metrics_logger.log_value("mine", episode.get_return(), reduce="mean")
            seen.append("end")

        def on_sample_end(self, *, samples: list, **kwargs: Any) -> None:
            seen.append(f"samples {len(samples)}")

    config = toy_config(env=AskTwice, max_turns=2, group_size=2, prompts_per_iteration=1).callbacks(Recorder)
    result = build(config).train()
    assert seen.count("created") == seen.count("start") == seen.count("step") == seen.count("end") == 2
    assert "environment" in seen
    assert "samples 2" in seen
    assert np.isfinite(result[names.ENV_RUNNERS]["mine"])


def test_learning_rate_follows_warm_up_and_decay(build: Make, toy_config: Make) -> None:
    """lr is reported as applied: linear warm-up, then linear decay to zero."""
    algo = build(toy_config().training(lr=1e-3, warmup_steps=2, lr_decay="linear", total_steps=4))
    rates = [float(algo.train()[names.LEARNERS]["default_policy"][names.LEARNING_RATE]) for _ in range(5)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0.0])


def test_rllib_schedules_count_completions(build: Make, toy_config: Make) -> None:
    """RLlib's own lr schedule works; its time unit is sampled episodes."""
    algo = build(toy_config().training(lr=[[0, 1e-3], [32, 0.0]]))
    rates = [float(algo.train()[names.LEARNERS]["default_policy"][names.LEARNING_RATE]) for _ in range(2)]
    assert rates == pytest.approx([5e-4, 0.0])


def test_gradient_checkpointing_changes_memory_only(build: Make, toy_config: Make, toy_model: str) -> None:
    """Recomputing layers in backward gives the same weights, bit by bit."""
    digests = []
    for flag in (False, True):
        algo = build(toy_config().model(toy_model, gradient_checkpointing=flag))
        algo.train()
        digests.append(algo.learner_group._learner.digest())
    assert digests[0] == digests[1]


def test_fp16_scales_the_loss_and_recovers_from_overflow(build: Make, toy_config: Make) -> None:
    """A loss scale that overflows fp16 gradients is halved until steps succeed; skipped steps are counted."""
    policy = load_policy("fp16").to_dict()
    policy["loss_scaling"] |= {"initial": 2.0**30, "growth_interval": 1000}
    algo = build(toy_config(policy).training(minibatches_per_epoch=4, num_epochs=4))
    learner = algo.train()[names.LEARNERS]["default_policy"]
    assert learner[names.NUM_SKIPPED_STEPS] > 0
    assert learner[names.NUM_OPTIMIZER_STEPS] == 16 - learner[names.NUM_SKIPPED_STEPS]
    assert learner[names.LOSS_SCALE] == 2.0 ** (30 - learner[names.NUM_SKIPPED_STEPS])
    assert algo.train()[names.LEARNERS]["default_policy"][names.NUM_OPTIMIZER_STEPS] > 0


def test_environment_state_is_part_of_a_checkpoint(build: Make, toy_config: Make, tmp_path: Any) -> None:
    """What a factory keeps (a curriculum) is saved with the run and is back on the runner after a restore."""
    algo = build(toy_config(env=Curriculum))
    algo.train()
    level = algo.env_runner.factories["train"].level
    path = algo.save_to_path(tmp_path / "c")
    algo.train()
    assert algo.env_runner.factories["train"].level > level > 0
    algo.restore_from_path(path)
    assert algo.env_runner.factories["train"].level == level


def test_timers_are_those_of_the_iteration(build: Make, toy_config: Make) -> None:
    """A slow iteration shows at once; RLlib's default would average over a hundred."""
    algo = build(toy_config(env=CopyDigit))
    fast = algo.train()[names.TIMERS][names.SAMPLE_TIMER]
    delay = algo.env_runner.factories["train"].config["delay_s"] = fast / 4
    slow = algo.train()[names.TIMERS][names.SAMPLE_TIMER]
    assert (
        slow >= 16 * delay
    )  # the environments of the 16 samples slept that long, four times the first iteration
