"""Train on a task of your own: a class with `reset` and `step`, named by import path.

    python examples/own_environment.py [--iterations 10]

The task: the model is shown a sum with labels ("3a+4b-2=") and is paid for ending its answer with an even number. It is
no useful task; it shows that any function of the text can be the reward.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from rllib_llm import GRPOConfig
from rllib_llm.envs import Prompt, StepResult


class EvenAnswer:
    """Pays 1 for an answer whose last digit is even."""

    def __init__(self, config: dict[str, Any], split: str, seed: int) -> None:
        self.terms = int(config.get("terms", 5))
        self.key = f"{split} {seed}"

    def reset(self, index: int) -> Prompt:
        numbers = random.Random(f"{self.key} {index}")
        labels = "abcdefgh"[: self.terms - 1]
        text = str(numbers.randint(1, 9)) + "".join(f"{label}+{numbers.randint(1, 9)}" for label in labels)
        return Prompt(text=f"{text}=", info={"id": str(index)})

    def step(self, completion: str) -> StepResult:
        return StepResult(reward=float(completion.strip()[-1:] in tuple("02468")), done=True)


def main(iterations: int) -> list[float]:
    """Mean reward of each iteration."""
    config = (
        GRPOConfig()
        .precision("unified-fp8")
        .model("tiny-chain")
        .environment("examples.own_environment:EvenAnswer", env_config={"terms": 5})
        .rollout(group_size=8, prompts_per_iteration=8, max_new_tokens=48)
        .training(lr=3e-4)
    )
    algorithm = config.build_algo()
    rewards = [float(algorithm.train()["env_runners"]["episode_return_mean"]) for _ in range(iterations)]
    algorithm.stop()
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10)
    print(" ".join(f"{reward:.2f}" for reward in main(parser.parse_args().iterations)))
