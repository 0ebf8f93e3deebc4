"""Check and retry: a wrong answer gets a hint and another turn. The multi-turn example, usable around any env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.protocol import EnvConfigError, Prompt, Split, StepResult, TextEnv

DEFAULT_HINT = "\nThat is wrong. Try again.\n"


class RetryFactory:
    """Gives wrong answers of another environment further turns (multi-turn).

    env_config: `env` and `env_config` (any single-turn environment whose step reports info["correct"]); `max_turns`
    (2); `observation` (what the model reads after a wrong answer); `discount` (0.5: each turn multiplies what a right
    answer earns). A wrong answer before the last turn earns nothing. Set rollout.max_turns at least as high.
    """

    def __init__(self, config: Mapping[str, Any], split: Split, seed: int):
        from rllib_llm.envs.registry import make_env

        section = Section(config, "env.config")
        inner = section.take("env", None, (str, type))
        inner_config = section.take("env_config", {}, Mapping)
        self.max_turns: int = section.take("max_turns", 2, int, lambda v: v >= 1, "an integer >= 1")
        self.observation: str = section.take("observation", DEFAULT_HINT, str, bool, "a non-empty string")
        self.discount: float = section.take(
            "discount", 0.5, float, lambda v: 0 < v <= 1, "a number in (0, 1]"
        )
        if inner is None:
            section.problem("env", "is missing: the environment to retry, e.g. reasoning_gym")
        else:
            self.inner = section.include("env", lambda: make_env(inner, inner_config, split, seed))
        section.finish()

    def __call__(self) -> RetryEnv:
        return RetryEnv(self.inner(), self.max_turns, self.observation, self.discount)

    def get_state(self) -> dict[str, Any]:
        return self.inner.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.inner.set_state(state)

    @property
    def num_problems(self) -> int | None:
        return self.inner.num_problems


class RetryEnv:
    """One episode of at most `max_turns` answers to one problem."""

    def __init__(self, inner: TextEnv, max_turns: int, observation: str, discount: float):
        self.inner, self.max_turns, self.observation, self.discount = inner, max_turns, observation, discount
        self._turn = 0

    def reset(self, index: int) -> Prompt:
        self._turn = 0
        return self.inner.reset(index)

    def step(self, completion: str) -> StepResult:
        """`info["turn"]` counts from 1. Raises `EnvConfigError` if the inner env does not say whether it was right."""
        if self._turn >= self.max_turns:
            raise RuntimeError("step() after the episode was done: call reset() first")
        self._turn += 1
        inner = self.inner.step(completion)
        if not inner.done or "correct" not in inner.info:
            raise EnvConfigError(
                'retry needs a single-turn env whose StepResult has done=True and info["correct"]'
            )
        if not inner.info["correct"] and self._turn < self.max_turns:
            return StepResult(0.0, False, self.observation, {}, inner.info | {"turn": self._turn})
        reward = inner.reward * self.discount ** (self._turn - 1) if inner.info["correct"] else inner.reward
        return StepResult(reward, True, "", inner.rewards, inner.info | {"turn": self._turn})
