"""Compare precision policies with Tune: one trial per policy, tracked as nested MLflow runs.

    python examples/tune_grid.py [--iterations 20] [--policies bf16 mixed-bf16-fp8 unified-fp8]

Then look at the runs: mlflow ui --backend-store-uri sqlite:///mlflow.db
"""

from __future__ import annotations

import argparse

from ray import tune

from rllib_llm import GRPO
from rllib_llm.experiment.file import load_experiment
from rllib_llm.tracking import MLflowCallback


def main(
    policies: list[str], iterations: int, overrides: tuple[str, ...] = (), tracking_uri: str | None = None
) -> list[tuple[str, float, float]]:
    """(policy, last mean reward, largest |Δlog-prob| of the last iteration) of each trial."""
    config = load_experiment("quickstart", overrides).to_grpo_config()
    config.precision(tune.grid_search(policies))
    analysis = tune.run(
        GRPO,
        name="policies",
        config=config,
        stop={"training_iteration": iterations},
        callbacks=[MLflowCallback(tracking_uri, "policies")],
        verbose=0,
    )
    rows = []
    for trial in analysis.trials:
        result = trial.last_result
        reward, largest = result["env_runners"]["episode_return_mean"], result["mismatch"]["max_abs"]
        rows.append((str(result["precision_policy"]), float(reward), float(largest)))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=["bf16", "mixed-bf16-fp8", "unified-fp8"])
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    for name, reward, largest in main(arguments.policies, arguments.iterations):
        print(f"{name:<24} reward {reward:.3f}   largest |Δlog-prob| {largest:.3g}")
