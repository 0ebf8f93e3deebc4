from __future__ import annotations

import pytest

from rllib_llm.envs import EnvConfigError, make_env
from rllib_llm.envs.calculator import calculate

GCD = {"env": "reasoning_gym", "env_config": {"task": "gcd", "answer": "last_number"}}


def test_wrong_answer_gets_a_hint_and_a_discounted_second_chance():
    """First wrong: no reward, an observation, not done; then right: the discounted reward."""
    factory = make_env("retry", {**GCD, "max_turns": 3, "observation": "no\n", "discount": 0.5})
    env = factory()
    env.reset(0)
    first = env.step("0")
    assert (first.reward, first.done, first.observation, first.info["turn"]) == (0.0, False, "no\n", 1)
    second = env.step(factory.inner.problem(0).answer)
    assert (second.reward, second.done, second.info["correct"]) == (0.5, True, True)


def test_right_answer_ends_the_episode_at_once():
    """No second turn after a right answer, and its reward is whole."""
    factory = make_env("retry", GCD)
    env = factory()
    env.reset(3)
    result = env.step(factory.inner.problem(3).answer)
    assert (result.reward, result.done) == (1.0, True)


def test_last_wrong_answer_ends_the_episode():
    """After max_turns wrong answers the episode is over; a further step is a programming error; reset starts anew."""
    env = make_env("retry", {**GCD, "max_turns": 2})()
    env.reset(0)
    assert [env.step("0").done for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="reset"):
        env.step("0")
    env.reset(1)
    assert env.step("0").done is False


def test_curriculum_counts_first_answers_only_and_is_saved_through_the_wrapper():
    """A retried right answer does not make the task look easy."""
    inner = {**GCD["env_config"], "curriculum": {"window": 2, "raise_at": 1.0}}
    factory = make_env("retry", {"env": "reasoning_gym", "env_config": inner})
    for index in range(6):
        env = factory()
        env.reset(index)
        env.step("0")
        env.step(factory.inner.problem(index).answer)
    assert factory.get_state() == {"curriculum": {"gcd": [0, 0, 0]}}
    factory.set_state({"curriculum": {"gcd": [1, 0, 0]}})
    assert factory().reset(0).info["level"] == 1


def test_wrappers_keep_the_splits_apart_by_passing_them_on():
    """The inner environment gets the wrapper's split."""
    assert make_env("retry", GCD, split="eval")().reset(0).info["split"] == "eval"
    assert make_env("calculator", GCD, split="eval")().reset(0).info["split"] == "eval"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*(3+4)", "14"),
        ("1/3", "1/3"),
        ("-0.1+0.2", "1/10"),
        (" 7 ", "7"),
        ("1/0", "error"),
        ("2**9**9", "error"),
        ("__import__('os')", "error"),
        ("(lambda: 1)()", "error"),
        ("True+1", "error"),
        ("1j", "error"),
        ("1+", "error"),
        ("", "error"),
        ("1+" * 150 + "1", "error"),
        ("(" * 190 + "1", "error"),
    ],
)
def test_calculator_is_exact_and_executes_nothing(expression, value):
    """Four operations on decimals; everything else is the text "error"."""
    assert calculate(expression) == value


def test_calculator_calls_are_turns_and_end_with_an_answer():
    """A call gets its result as observation; calls beyond max_calls are judged as the answer."""
    factory = make_env("calculator", {**GCD, "max_calls": 2})
    env = factory()
    env.reset(0)
    call = env.step("First <calc>12/4</calc>")
    assert (call.reward, call.done, call.observation) == (0.0, False, "<result>3</result>")
    answer = env.step(f"it is {factory.inner.problem(0).answer}")
    assert (answer.reward, answer.done, answer.info["tool_calls"]) == (1.0, True, 1)
    env.reset(1)
    assert [env.step("<calc>1</calc>").done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("env", "config", "part"),
    [
        ("retry", {}, "env is missing"),
        ("retry", {**GCD, "max_turns": 0, "discount": 2}, "discount = 2"),
        ("retry", {"env": "reasoning_gym", "env_config": {"task": "gdc"}}, "did you mean 'gcd'"),
        ("calculator", {**GCD, "calls": 1}, "calls is not an option"),
    ],
)
def test_wrong_configuration_is_refused(env, config, part):
    """Mistakes of the wrapper and of the wrapped environment are both reported."""
    with pytest.raises(EnvConfigError) as error:
        make_env(env, config)
    assert part in str(error.value)


def test_retry_needs_an_env_that_says_whether_the_answer_was_right():
    """Around an env without info["correct"] retry would never retry: it is refused."""
    env = make_env("retry", {"env": "tests.envs.helpers:EchoEnv"})()
    env.reset(0)
    with pytest.raises(EnvConfigError, match="correct"):
        env.step("1")
