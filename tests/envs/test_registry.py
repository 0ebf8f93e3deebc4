from __future__ import annotations

import pytest

from rllib_llm.envs import (
    EnvConfigError,
    TextEnv,
    TextEnvFactory,
    make_env,
    register_text_env,
    registered_envs,
)
from tests.envs.helpers import EchoEnv, NotAnEnv, WrongConstructor


@pytest.mark.parametrize("env", [EchoEnv, "tests.envs.helpers:EchoEnv"])
def test_class_and_path_give_a_factory_of_independent_envs(env):
    """A user's class needs reset and step only, and each call of the factory is a new episode."""
    factory = make_env(env, {"a": 1}, split="eval", seed=3)
    assert isinstance(factory, TextEnvFactory)
    first, second = factory(), factory()
    assert isinstance(first, TextEnv)
    assert (first.config, first.split, first.seed) == ({"a": 1}, "eval", 3)
    first.reset(1)
    second.reset(2)
    assert (first.step("1").reward, second.step("1").reward) == (1.0, 0.0)


def test_registered_name_resolves_and_cannot_be_taken_twice():
    """A registered name gives its class; registering another class under it is refused."""
    register_text_env("echo-for-test", EchoEnv)
    register_text_env("echo-for-test", EchoEnv)
    assert make_env("echo-for-test")().reset(5).text == "train 5"
    with pytest.raises(ValueError, match="taken by EchoEnv"):
        register_text_env("echo-for-test", type("Other", (EchoEnv,), {}))


def test_shipped_envs_are_registered_and_described():
    """`rllib-llm envs list` prints the first docstring line of each, so each has one."""
    envs = registered_envs()
    assert {"reasoning_gym", "jsonl_math", "retry", "calculator"} <= set(envs)
    assert all((cls.__doc__ or "").strip() for cls in envs.values())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("reasoning_gmy", "did you mean 'reasoning_gym'"),
        ("tests.envs.helpers:EchoEnvy", "did you mean 'EchoEnv'"),
        ("no.such.module:Env", "cannot import 'no.such.module'"),
        (":Env", "expected 'package.module:Name'"),
        (NotAnEnv, "neither a TextEnv"),
        (WrongConstructor, "must be constructible"),
        ("tests.envs.helpers:vowels", "not a class"),
        (7, "expected a name, a class"),
    ],
)
def test_wrong_env_is_refused_with_what_to_do(env, message):
    """Each way to name an env wrongly gets its own message."""
    with pytest.raises(EnvConfigError, match=message):
        make_env(env)


def test_wrong_split_is_refused():
    """A typo in the split must not silently train on it."""
    with pytest.raises(EnvConfigError, match="train, eval"):
        make_env(EchoEnv, {}, split="test")
