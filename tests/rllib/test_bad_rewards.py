"""Rewards that environments should not give, and settings of the losses that would be silently useless."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import ReinforcePPConfig
from rllib_llm import metric_names as names
from rllib_llm.algorithm.sampling import NoSamplesError
from rllib_llm.envs.protocol import StepResult
from tests.rllib.toy import CopyDigit

Make = Callable[..., Any]


class Spoilt(CopyDigit):
    """Every `config["every"]`-th answer, counted over all environments, gets `config["result"]`."""

    calls = 0

    def step(self, completion: str) -> StepResult:
        type(self).calls += 1
        good = super().step(completion)
        if type(self).calls % self.config["every"]:
            return StepResult(good.reward, True, rewards={"digit": 1.0})
        return self.config["result"]


def bad(every: int, result: Any) -> dict[str, Any]:
    Spoilt.calls = 0
    return {"every": every, "result": result}


@pytest.mark.parametrize(
    "result",
    [
        StepResult(math.nan, True),
        StepResult(math.inf, True),
        StepResult(1e300, True),
        StepResult(1.0, True, rewards={"digit": math.nan}),
        None,
    ],
    ids=["nan", "inf", "beyond fp32", "a named reward is nan", "no StepResult"],
)
def test_a_result_that_is_no_number_costs_its_sample(
    build: Make, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    """4 of 16 answers get no usable reward: 4 counted, 12 trained, and the driver's log says why."""
    algo = build(env=Spoilt, env_config=bad(4, result))
    with caplog.at_level(logging.WARNING, logger="rllib_llm.algorithm"):
        got = algo.train()
    assert got[names.ENV_RUNNERS][names.NUM_REWARD_ERRORS] == 4
    assert len(algo.last_episodes) == 12
    assert got[names.ENV_RUNNERS][names.REWARDS] == {"digit": 1.0}
    assert "4 sample(s) lost to errors of the environment, the last: an episode of problem 3" in caplog.text


def test_one_answer_left_in_every_group_does_not_end_the_run(build: Make) -> None:
    """Groups of two that lose one answer each have nothing to compare: advantages 0, all counted, training goes on."""
    algo = build(env=Spoilt, env_config=bad(2, None), group_size=2)
    got = algo.train()
    assert got[names.NUM_GROUPS_WITHOUT_SIGNAL] == 4
    assert got[names.LEARNERS]["default_policy"][names.GRAD_NORM] == 0.0


def train_three_times(algo: Any) -> None:
    for _ in range(3):
        algo.train()


def test_the_error_for_no_samples_says_what_the_environment_said(build: Make) -> None:
    """When every answer is lost, training ends with the environment's own reason."""
    algo = build(env=Spoilt, env_config=bad(1, StepResult(math.nan, True)))
    with pytest.raises(NoSamplesError, match=r"(?s)Last errors:.*the reward is nan"):
        train_three_times(algo)


def test_the_error_for_no_samples_names_dynamic_sampling(build: Make, toy_config: Make) -> None:
    """Equal rewards everywhere leave dynamic sampling without a group, and the error says so."""
    config = toy_config(env=Spoilt, env_config=bad(1, StepResult(0.5, True))).training(dynamic_sampling=True)
    algo = build(config)
    with pytest.raises(NoSamplesError, match="rewards were all equal: 16"):
        train_three_times(algo)


def test_groups_of_one_have_a_signal_in_reinforce_pp(build: Make, toy_model: str) -> None:
    """REINFORCE++ compares over the batch: eight groups of one answer teach, and none is counted as silent."""
    config = (
        ReinforcePPConfig()
        .precision("unified-fp8")
        .model(toy_model)
        .environment(CopyDigit)
        .rollout(group_size=1, prompts_per_iteration=8, max_new_tokens=4)
        .training(lr=1e-3)
    )
    got = build(config).train()
    assert got[names.NUM_GROUPS_WITHOUT_SIGNAL] == 0
    assert got[names.LEARNERS]["default_policy"][names.GRAD_NORM] > 0


class Renamed(CopyDigit):
    """Each problem is a task of its own, with a reward of that name."""

    def step(self, completion: str) -> StepResult:
        name = f"task/{self.index}"
        return StepResult(super().step(completion).reward, True, rewards={name: 1.0}, info={"task": name})


def test_results_hold_what_this_iteration_measured_and_no_nan(build: Make) -> None:
    """Tasks and rewards of the first iteration are absent from the second (RLlib would report them as NaN)."""
    algo = build(env=Renamed)
    for first in (0, 4):
        got = algo.train()
        expected = {f"task_{i}" for i in range(first, first + 4)}
        assert set(got[names.MISMATCH]["by_environment"]) == expected
        assert {k.replace("/", "_") for k in flat(got[names.ENV_RUNNERS][names.REWARDS])} == expected
        assert not any(math.isnan(v) for v in flat(got[names.MISMATCH]).values())


def test_the_overlong_penalty_is_reported_beside_the_reward(build: Make, toy_config: Make) -> None:
    """Its mean over the episodes is a metric of its own; the episode return stays what the environment paid."""
    algo = build(toy_config().training(overlong_buffer=3, overlong_penalty=0.5))
    got = algo.train()
    lengths = [e.num_trained_tokens for e in algo.last_episodes]
    expected = sum(-0.5 * max(0, n - 1) / 3 for n in lengths) / len(lengths)
    assert got[names.OVERLONG_PENALTY_MEAN] == pytest.approx(expected)
    returns = [e.reward for e in algo.last_episodes]
    assert got[names.ENV_RUNNERS][names.EPISODE_RETURN_MEAN] == pytest.approx(sum(returns) / len(returns))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, float]:
    out: dict[str, float] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: float(value)}
    return out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_config": {"kl_coeff": 0.1}}, "set train.kl_coeff"),
        ({"loss_config": {"entropy_coeff": 0.1}}, "set train.entropy_coeff"),
        ({"correction": {"kind": "tis_token"}}, "correction.upper = None: kind tis_token needs this bound"),
        ({"correction": {"kind": "tis_token", "upper": "2"}}, "correction.upper = '2'"),
        ({"correction": {"kind": "icepop", "lower": 2.0, "upper": 1.0}}, "is not below upper 1.0"),
        ({"kl_coeff": -1.0, "kl_in": "reward"}, "kl_coeff = -1.0"),
        ({"entropy_coeff": math.inf}, "entropy_coeff = inf"),
        ({"dynamic_sampling": True, "max_sample_rounds": 1}, "max_sample_rounds = 1"),
    ],
)
def test_settings_without_the_wanted_effect_are_refused(
    toy_config: Make, settings: dict[str, Any], said: str
) -> None:
    """What would fail in the first update, or do nothing, is an error of the config."""
    with pytest.raises(ValueError, match="problem") as error:
        toy_config().training(**settings).validate()
    assert said in str(error.value)


def test_dynamic_sampling_of_single_answers_is_refused(toy_config: Make) -> None:
    """A group of one answer never has rewards that differ."""
    config = toy_config(group_size=1).training(loss="reinforce++", dynamic_sampling=True)
    with pytest.raises(ValueError, match="dynamic_sampling = True: keeps groups whose rewards differ"):
        config.validate()


def test_a_reference_without_a_weight_is_refused(toy_config: Make, toy_model: str) -> None:
    """A reference model that no KL term reads would only cost its memory."""
    with pytest.raises(ValueError, match=r"has no effect with train.kl_coeff = 0"):
        toy_config().model(toy_model, reference_path="tiny-chain").validate()


def test_a_reference_with_another_vocabulary_is_refused(
    toy_config: Make, toy_model: str, ray_session: Any
) -> None:
    """Token ids of one model mean nothing to a model with another tokenizer; the error shows a token that differs."""
    config = toy_config().model(toy_model, reference_path="tiny-chain").training(kl_coeff=0.1)
    with pytest.raises(ValueError, match=r"has another vocabulary than model.path"):
        config.build_algo()
