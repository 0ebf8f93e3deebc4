"""Named rewards and their weights. Each is logged under its own name; only the weighted sum trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_llm.envs.checks import Section, import_object
from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.envs.reward_calls import call_reward, function_style, user_reward


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees. `extracted` is None when the completion holds no answer.

    row: the columns of the problem's row in its file.
    """

    completion: str
    extracted: str | None
    question: str
    answer: str
    problem: str
    score: Callable[[str], float] = field(repr=False)
    info: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict, repr=False)


RewardFunction = Callable[..., float]


def correctness(sample: RewardInput) -> float:
    """The task's own score of the extracted answer, in [0, 1]; 0 without an answer."""
    return 0.0 if sample.extracted is None else float(sample.score(sample.extracted))


def format_(sample: RewardInput) -> float:
    """1 when an answer was found in the form asked for, else 0."""
    return float(sample.extracted is not None)


def length(sample: RewardInput, free_chars: int, max_chars: int) -> float:
    """0 up to `free_chars` characters, falling linearly to -1 at `max_chars` and beyond (the soft overlong form of
    DAPO, arXiv 2503.14476 eq. 13, in characters: the environment does not see tokens)."""
    excess = len(sample.completion) - free_chars
    return -min(1.0, max(0.0, excess / (max_chars - free_chars)))


BUILT_IN: dict[str, RewardFunction] = {"correctness": correctness, "format": format_, "length": length}


@dataclass(frozen=True)
class NamedReward:
    """One reward of a config: its name, function, weight in the sum, and further arguments of the function."""

    name: str
    function: RewardFunction
    weight: float
    options: dict[str, Any]


@dataclass(frozen=True)
class RewardComposer:
    """Weighted sum of named rewards: `total, values = composer(sample)`."""

    rewards: tuple[NamedReward, ...]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None, where: str = "env.config.rewards"
    ) -> RewardComposer:
        """From {name: weight} or {name: {weight, function: "module:name", **options}}; default {correctness: 1}.

        A function takes (sample: RewardInput, **options), or (completion, answer, **row) as in `reward_calls`.
        Raises `EnvConfigError` listing every wrong entry.
        """
        if config is not None and not isinstance(config, Mapping):
            raise EnvConfigError(f"{where} = {config!r}: expected a mapping of reward names to weights")
        problems: list[str] = []
        rewards = []
        for name, entry in (config or {"correctness": 1.0}).items():
            try:
                rewards.append(_named_reward(str(name), entry, f"{where}.{name}"))
            except EnvConfigError as error:
                problems.append(str(error))
        if problems:
            raise EnvConfigError("\n".join(problems))
        return cls(tuple(rewards))

    @classmethod
    def from_reward(cls, reward: Any, where: str = "env.config.reward") -> RewardComposer:
        """From `reward`: a function or "package.module:function", or several, {path or name: weight} or a list.

        Raises `EnvConfigError` listing every wrong entry.
        """
        if isinstance(reward, str) or callable(reward):
            reward = {reward: 1.0}
        elif isinstance(reward, (list, tuple)):
            reward = dict.fromkeys(reward, 1.0)
        if not isinstance(reward, Mapping) or not reward:
            raise EnvConfigError(
                f"{where} = {reward!r}: expected 'package.module:function', a list of such, or a mapping of them "
                f"to weights"
            )
        entries: dict[str, Any] = {}
        for key, weight in reward.items():
            path = key if callable(key) else str(key)
            name = path.__name__ if callable(path) else path.rpartition(":")[2]
            if name in entries:
                raise EnvConfigError(
                    f"{where}: two rewards are called {name!r}; use env.config.rewards and name them"
                )
            entry = dict(weight) if isinstance(weight, Mapping) else {"weight": weight}
            entries[name] = entry if path in BUILT_IN else entry | {"function": path}
        return cls.from_config(entries, where)

    def __call__(self, sample: RewardInput) -> tuple[float, dict[str, float]]:
        """(weighted sum, unweighted values by name). Raises `RewardError` naming the function that failed."""
        values = {reward.name: _evaluate(reward, sample) for reward in self.rewards}
        return sum(reward.weight * values[reward.name] for reward in self.rewards), values


def _evaluate(reward: NamedReward, sample: RewardInput) -> float:
    return call_reward(reward.name, sample.problem, lambda: reward.function(sample, **reward.options))


def _named_reward(name: str, entry: Any, where: str) -> NamedReward:
    if isinstance(entry, (int, float)) and not isinstance(entry, bool):
        entry = {"weight": float(entry)}
    if not isinstance(entry, Mapping):
        raise EnvConfigError(f"{where} = {entry!r}: expected a weight or {{weight, function, options…}}")
    options = {str(key): value for key, value in entry.items() if key not in ("weight", "function")}
    section = Section({key: entry[key] for key in ("weight", "function") if key in entry}, where)
    weight = section.take("weight", 1.0, float, math.isfinite, "a finite number")
    path = section.take(
        "function", None, object, lambda v: isinstance(v, str) or callable(v), "'package.module:name'"
    )
    if path is None and name not in BUILT_IN:
        section.problem(
            "function",
            f"is missing: {name!r} is not built in ({', '.join(sorted(BUILT_IN))}); "
            f"give function: 'package.module:name'",
        )
    section.finish()
    function = (
        BUILT_IN[name]
        if path is None
        else path
        if callable(path)
        else import_object(path, f"{where}.function")
    )
    if function is length:
        options = _length_options(options, where)
    elif function in BUILT_IN.values() and options:
        raise EnvConfigError(f"{where} takes no options, got {', '.join(sorted(options))}")
    if not callable(function):
        raise EnvConfigError(f"{where}.function = {path!r} is not callable")
    if path is not None and function_style(function, path, where) == "completion":
        function = user_reward(function)
    return NamedReward(name, function, weight, options)


def _length_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    section = Section(options, where)
    free = section.take("free_chars", 0, int, lambda v: v >= 0, "an integer >= 0")
    limit = section.take("max_chars", None, int, lambda v: v > 0, "an integer > 0")
    if limit is None or limit <= free:
        section.problem("max_chars", f"= {limit!r} must be given and be larger than free_chars = {free}")
    section.finish()
    return {"free_chars": free, "max_chars": limit}
