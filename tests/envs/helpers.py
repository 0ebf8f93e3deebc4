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
