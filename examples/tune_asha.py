"""Search the learning rate with ASHA: trials that lag at a rung end early and give their time to others.

    python examples/tune_asha.py [--trials 8] [--iterations 16] [--policy unified-fp8]

The score is the mean reward of an iteration. Rewards are noisy early on, so the first rung is not the first iteration.
"""

from __future__ import annotations

import argparse

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from rllib_llm import GRPO
from rllib_llm.experiment.file import load_experiment
from rllib_llm.tracking import MLflowCallback


def main(
    trials: int,
    iterations: int,
    policy: str = "unified-fp8",
    overrides: tuple[str, ...] = (),
    tracking_uri: str | None = None,
) -> list[tuple[float, int, float]]:
    """(learning rate, iterations it was given, last mean reward) of each trial, the best first."""
    config = load_experiment("quickstart", [f"precision={policy}", *overrides]).to_grpo_config()
    config.training(lr=tune.loguniform(1e-6, 1e-3))
    analysis = tune.run(
        GRPO,
        name="asha",
        config=config,
        num_samples=trials,
        scheduler=ASHAScheduler(
            time_attr="training_iteration",
            metric="env_runners/episode_return_mean",
            mode="max",
            max_t=iterations,
            grace_period=max(1, iterations // 4),
            reduction_factor=2,
        ),
        callbacks=[MLflowCallback(tracking_uri, "asha")],
        verbose=0,
    )
    rows = [
        (
            float(trial.config["train"]["lr"]),
            int(trial.last_result["training_iteration"]),
            float(trial.last_result["env_runners"]["episode_return_mean"]),
        )
        for trial in analysis.trials
    ]
    return sorted(rows, key=lambda row: (row[1], row[2]), reverse=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--policy", default="unified-fp8")
    arguments = parser.parse_args()
    for lr, done, reward in main(arguments.trials, arguments.iterations, arguments.policy):
        print(f"lr {lr:.2e}   {done:3d} iterations   reward {reward:.3f}")
