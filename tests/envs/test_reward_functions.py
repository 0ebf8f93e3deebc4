from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from rllib_llm.envs import EnvConfigError, RewardError, make_env
from rllib_llm.envs.reward_calls import as_number

HELPERS = "tests.envs.helpers"


@pytest.fixture
def config(tmp_path):
    for name, count in (("train", 3), ("eval", 1)):
        rows = [{"question": f"{name} {i}?", "answer": f"word {i}", "limit": 4} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")}


def step(config, completion, **options):
    env = make_env("jsonl_math", {**config, **options})()
    env.reset(0)
    return env.step(completion)


@pytest.mark.parametrize("name", ["short", "slow_short", "batch_short"])
def test_a_function_of_completion_and_row_is_the_reward(config, name):
    """f(completion, answer, **row): sync, async and of a batch; the row's columns come by name."""
    assert step(config, "abcd", reward=f"{HELPERS}:{name}").reward == 1.0
    result = step(config, "abcde", reward=f"{HELPERS}:{name}")
    assert (result.reward, result.rewards) == (0.0, {name: 0.0})


def test_several_functions_have_weights(config):
    """A list weighs each with 1, a mapping says the weight; built-in rewards may be among them."""
    both = [f"{HELPERS}:short", f"{HELPERS}:batch_async"]
    assert step(config, "abcd", reward=both).reward == 1.5
    assert step(config, "abcd", reward={both[0]: 2.0, both[1]: {"weight": 4}}).reward == 4.0
    assert step(config, "word 0", reward={both[1]: 2, "format": 1}, answer="whole").reward == 2.0


def test_async_functions_work_inside_a_running_loop(config):
    """As in the workers of Ray, where a loop may run already."""

    async def inside():
        return step(config, "abcd", reward=f"{HELPERS}:slow_short").reward

    assert asyncio.run(inside()) == 1.0


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("leaves", "SystemExit: 3"),
        ("leaves_async", "SystemExit: 3"),
        ("unprintable", "Unprintable: .its text cannot be shown"),
        ("text_reward", "returned '1.0': expected a number, not str"),
        ("none_reward", "returned None: expected a number"),
        ("list_reward", "returned \\[1.0\\]: expected a number, not list"),
    ],
)
def test_what_a_function_does_wrong_costs_one_sample(config, name, cause):
    """Whatever it raises or returns is a RewardError that says what was expected."""
    with pytest.raises(RewardError, match=cause):
        step(config, "abcd", reward=f"{HELPERS}:{name}")
    assert step(config, "abcd", reward=f"{HELPERS}:short").reward == 1.0


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1.0]), np.int64(1)])
def test_numbers_of_all_libraries_are_numbers(value):
    """Python's and numpy's scalars, and arrays of one element."""
    assert as_number(value) == 1.0


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        None,
        [],
        [1.0],
        {},
        {"score": 1},
        float("nan"),
        float("inf"),
        np.nan,
        np.zeros(0),
        1j,
        object(),
    ],
)
def test_everything_else_is_refused_with_what_came(value):
    """Texts, None, containers, NaN and infinities are no rewards."""
    with pytest.raises((TypeError, ValueError)):
        as_number(value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"reward": "no.such:f"}, "cannot import"),
        ({"reward": "json:lodas"}, "did you mean 'loads'"),
        ({"reward": 5}, "expected 'package.module:function'"),
        ({"reward": {}}, "expected 'package.module:function'"),
        ({"reward": "json:loads", "rewards": {"format": 1}}, "give one of them"),
        ({"reward": ["json:loads", "pickle:loads"]}, "two rewards are called 'loads'"),
    ],
)
def test_wrong_rewards_are_refused_before_the_run(config, options, part):
    """Each mistake is named."""
    with pytest.raises(EnvConfigError) as error:
        make_env("jsonl_math", {**config, **options})
    assert part in str(error.value)


def test_rows_that_only_a_function_judges_need_no_answer(tmp_path):
    """Without `correctness` the file's answers are not compared, so they may be anything."""
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"{name}?", "limit": 4}))
    config = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")}
    assert step(config, "abcd", reward=f"{HELPERS}:slow_short").reward == 1.0
    with pytest.raises(EnvConfigError, match="line 1: 'answer' must be"):
        make_env("jsonl_math", config)


def test_the_environment_says_what_is_solved(config):
    """A right answer, or from a reward on that solved_at names; the sum of the rewards alone says nothing."""
    result = step(config, "no word", rewards={"correctness": 1, "format": 5}, answer="whole")
    assert result.reward == 5.0
    assert result.info["correct"] is False
    assert step(config, "abcd", reward=f"{HELPERS}:short", solved_at=1).info["solved"] is True
    assert step(config, "abcde", reward=f"{HELPERS}:short", solved_at=1).info["solved"] is False
