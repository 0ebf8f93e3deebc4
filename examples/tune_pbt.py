"""Population based training: a trial that lags takes weights and settings of a better one, and varies the settings.

    python examples/tune_pbt.py [--population 4] [--iterations 20] [--every 5]

Varied are the learning rate and the sampling temperature (a nested key). The precision policy is the same for all: a
checkpoint of one policy is refused under another. In MLflow a varied setting is a curve, `config/train/lr`.
"""

from __future__ import annotations

import argparse
from typing import Any

from ray import tune
from ray.tune import CheckpointConfig
from ray.tune.schedulers import PopulationBasedTraining

from rllib_llm import GRPO
from rllib_llm.experiment.file import load_experiment
from rllib_llm.tracking import MLflowCallback


def main(
    population: int,
    iterations: int,
    every: int,
    overrides: tuple[str, ...] = (),
    tracking_uri: str | None = None,
) -> list[tuple[float, float, float]]:
    """(learning rate, temperature, last mean reward) with which each trial ended, the best first."""
    config = load_experiment("quickstart", overrides).to_grpo_config().to_dict()
    config["train"]["lr"] = tune.loguniform(1e-5, 1e-3)
    config["rollout"]["temperature"] = 1.0
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="env_runners/episode_return_mean",
        mode="max",
        perturbation_interval=every,
        hyperparam_mutations={
            "train": {"lr": tune.loguniform(1e-5, 1e-3)},
            "rollout": {"temperature": tune.uniform(0.8, 1.2)},
        },
        quantile_fraction=0.5 if population < 4 else 0.25,
        synch=True,  # compare trials at the same iteration, whatever their speed
    )
    analysis = tune.run(
        GRPO,
        name="pbt",
        config=config,
        num_samples=population,
        scheduler=scheduler,
        stop={"training_iteration": iterations},
        checkpoint_config=CheckpointConfig(checkpoint_frequency=every, num_to_keep=4),
        callbacks=[MLflowCallback(tracking_uri, "pbt")],
        verbose=0,
    )
    return sorted(map(end_of, analysis.trials), key=lambda row: row[2], reverse=True)


def end_of(trial: Any) -> tuple[float, float, float]:
    """(learning rate, temperature, mean reward) at the end of a trial."""
    return (
        float(trial.config["train"]["lr"]),
        float(trial.config["rollout"]["temperature"]),
        float(trial.last_result["env_runners"]["episode_return_mean"]),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--population", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="iterations between two exchanges")
    arguments = parser.parse_args()
    for lr, temperature, reward in main(arguments.population, arguments.iterations, arguments.every):
        print(f"lr {lr:.2e}   temperature {temperature:.2f}   reward {reward:.3f}")
