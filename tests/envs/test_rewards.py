from __future__ import annotations

import pickle

import pytest

from rllib_llm.envs import EnvConfigError, RewardError, make_env
from tests.envs.helpers import PRODUCTS

HELPERS = "tests.envs.helpers"


def play(rewards, completion="", right=False):
    env_factory = make_env("reasoning_gym", {**PRODUCTS, "rewards": rewards})
    env = env_factory()
    env.reset(0)
    return env.step(env_factory.problem(0).answer if right else completion)


def test_rewards_are_weighted_and_reported_apart():
    """reward is the weighted sum; rewards holds each value without its weight."""
    result = play(
        {
            "correctness": 2.0,
            "format": 0.5,
            "length": {"weight": 0.1, "free_chars": 0, "max_chars": 100000},
            "vowels": {"function": f"{HELPERS}:vowels", "weight": 3.0, "most": 5},
        },
        right=True,
    )
    assert set(result.rewards) == {"correctness", "format", "length", "vowels"}
    assert (result.rewards["correctness"], result.rewards["format"], result.rewards["vowels"]) == (
        1.0,
        1.0,
        0.0,
    )
    assert -1e-3 < result.rewards["length"] < 0
    assert result.reward == pytest.approx(2.5 + 0.1 * result.rewards["length"])
    assert result.info["correct"] is True


@pytest.mark.parametrize(("chars", "value"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (500, -1.0)])
def test_length_penalty_is_linear_between_its_bounds(chars, value):
    """0 up to free_chars, -1 from max_chars, a straight line between."""
    result = play({"length": {"free_chars": 10, "max_chars": 20}}, "x" * chars)
    assert result.reward == result.rewards["length"] == value


def test_no_answer_earns_nothing():
    """Neither correctness nor format pays when no answer can be found."""
    result = play({"correctness": 1.0, "format": 1.0}, "I do not know")
    assert (result.reward, result.info) == (0.0, {"correct": False, "extracted": None})


@pytest.mark.parametrize(("name", "cause"), [("failing", "KeyError"), ("not_a_number", "TypeError")])
def test_failing_reward_is_a_named_error_that_survives_pickling(name, cause):
    """What a reward raises, or a non-finite value, becomes a RewardError that names reward and problem."""
    with pytest.raises(RewardError, match=f"'bad' raised {cause}") as caught:
        play({"bad": {"function": f"{HELPERS}:{name}"}})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.reward, copy.problem, copy.cause) == (
        caught.value.reward,
        caught.value.problem,
        caught.value.cause,
    )
    assert copy.problem.startswith("products/")
    assert str(copy) == str(caught.value)


def test_wrong_rewards_are_reported_together():
    """One error names every wrong entry."""
    with pytest.raises(EnvConfigError) as error:
        play(
            {
                "corectness": 1.0,
                "format": "high",
                "length": {"weight": 1.0},
                "x": {"function": f"{HELPERS}:none"},
            }
        )
    for part in ("corectness.function is missing", "format = 'high'", "max_chars", "has no 'none'"):
        assert part in str(error.value)
