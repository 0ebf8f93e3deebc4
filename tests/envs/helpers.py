"""Small environments that tests name by path, and short cuts."""

from __future__ import annotations

from typing import Any

from rllib_llm.envs import Prompt, RewardInput, StepResult

PRODUCTS = {"task": "products", "task_config": {"min_digits": 1, "max_digits": 2}, "answer": "last_number"}


class EchoEnv:
    """Asks for a number to be repeated."""

    def __init__(self, config: dict[str, Any], split: str, seed: int):
        self.config, self.split, self.seed = config, split, seed
        self.number = -1

    def reset(self, index: int) -> Prompt:
        self.number = index
        return Prompt(text=f"{self.split} {index}")

    def step(self, completion: str) -> StepResult:
        return StepResult(float(completion == str(self.number)), True)


class NotAnEnv:
    """Has neither the methods of an env nor of a factory."""

    def __init__(self, config: dict[str, Any], split: str, seed: int):
        pass


class WrongConstructor(EchoEnv):
    """An env that cannot be built from (config, split, seed)."""

    def __init__(self) -> None:
        super().__init__({}, "train", 0)


def vowels(sample: RewardInput, most: int = 10) -> float:
    """Reward function of a user: share of `most` vowels written."""
    return min(1.0, sum(c in "aeiou" for c in sample.completion) / most)


def failing(sample: RewardInput) -> float:
    raise KeyError("no such key")


def not_a_number(sample: RewardInput) -> float:
    return float("nan")


def short(completion: str, answer: str, **row: Any) -> float:
    """Reward of a user in the form of other libraries: 1 for the row's `limit` characters at most."""
    return float(len(completion) <= int(row["limit"]))


async def slow_short(completion: str, limit: str) -> float:
    """The same, async and with the one column it needs."""
    import asyncio

    await asyncio.sleep(0)
    return float(len(completion) <= int(limit))


def batch_short(completions: list[str], limit: list[str], **kwargs: Any) -> list[float]:
    """The same for a batch."""
    return [float(len(text) <= int(most)) for text, most in zip(completions, limit, strict=True)]


async def batch_async(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5 for _ in completions]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def leaves(completion: str, answer: str) -> float:
    raise SystemExit(3)


async def leaves_async(completion: str, answer: str) -> float:
    raise SystemExit(3)


def unprintable(completion: str, answer: str) -> float:
    raise Unprintable


def returns(value: Any) -> Any:
    def reward(completion: str, answer: str) -> Any:
        return value

    return reward


text_reward = returns("1.0")
none_reward = returns(None)
list_reward = returns([1.0])
