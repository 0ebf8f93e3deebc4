"""Go on with a Tune experiment that was interrupted, killed, or lost trials to errors.

    python examples/tune_resume.py DIRECTORY          # start, or go on if DIRECTORY has an experiment
    python examples/tune_resume.py DIRECTORY --iterations 40

Ctrl-C (or kill -9) at any time, then the same command again: finished trials are kept, the others continue from their
last checkpoint, in the same MLflow runs. Without a checkpoint a trial would begin anew, so checkpoints are written
often.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ray import tune
from ray.tune import CheckpointConfig, RunConfig

from rllib_llm import GRPO
from rllib_llm.experiment.file import load_experiment
from rllib_llm.tracking import MLflowCallback


def main(
    directory: Path,
    iterations: int,
    overrides: tuple[str, ...] = (),
    tracking_uri: str | None = None,
) -> dict[str, int]:
    """Iterations that each policy's trial has run in all."""
    config = load_experiment("quickstart", overrides).to_grpo_config()
    config.precision(tune.grid_search(["bf16", "unified-fp8"]))
    directory = directory.absolute()  # Ray takes a relative path for an address without a scheme
    if tune.Tuner.can_restore(str(directory)):
        tuner = tune.Tuner.restore(str(directory), GRPO, resume_unfinished=True, resume_errored=True)
    else:
        tuner = tune.Tuner(
            GRPO,
            param_space=config,
            run_config=RunConfig(
                name=directory.name,
                storage_path=str(directory.parent),
                stop={"training_iteration": iterations},
                checkpoint_config=CheckpointConfig(checkpoint_frequency=2, num_to_keep=2),
                callbacks=[MLflowCallback(tracking_uri, "resume")],
                verbose=0,
            ),
        )
    results = tuner.fit()
    return {
        str(result.metrics["precision_policy"]): int(result.metrics["training_iteration"])
        for result in results
        if result.metrics
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--iterations", type=int, default=20, help="of an experiment that is begun")
    arguments = parser.parse_args()
    for policy, done in main(arguments.directory, arguments.iterations).items():
        print(f"{policy:<16} {done} iterations")
