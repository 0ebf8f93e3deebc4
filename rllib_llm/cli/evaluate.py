"""Evaluate a checkpoint on held-out prompts, in this process, under the policy it was written with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllib_llm.cli import table
from rllib_llm.directories import EXPERIMENT_FILE, find_checkpoint, find_experiment
from rllib_llm.experiment_file import load_experiment
from rllib_llm.tracking.entries import metrics_of

# metric of evaluation/env_runners -> how it is called in the table
_SHOWN = {
    "episode_return_mean": "mean reward",
    "solved_share": "solved (reward >= 1)",
    "num_episodes": "answers",
    "response_length_mean": "mean length (tokens)",
    "truncated_share": "cut off by length",
    "tokens_per_s": "tokens/s",
}


def evaluate_checkpoint(path: Path, prompts: int | None) -> str:
    """The table of one evaluation.

    path: a checkpoint, or a directory with some (the furthest trained is taken). prompts: held-out prompts, None for
    as many as the checkpoint's config says.

    Raises ExperimentError where there is no complete checkpoint.
    """
    checkpoint = find_checkpoint(path)
    algorithm = _restore(checkpoint, prompts)
    try:
        result = metrics_of(algorithm.evaluate())
        policy = algorithm.settings.policy
    finally:
        algorithm.stop()
    rows = [
        ("checkpoint", str(checkpoint)),
        ("policy", f"{policy.name} (fingerprint {policy.fingerprint[:16]})"),
    ]
    for key, name in _SHOWN.items():
        if f"env_runners/{key}" in result:
            rows.append((name, f"{result[f'env_runners/{key}']:.4g}"))
    return table.pairs(rows)


def _restore(checkpoint: Path, prompts: int | None) -> Any:
    """The Algorithm of a checkpoint.

    Of `rllib-llm train`: rebuilt from its experiment.yaml without actors, in this process. Of Tune or Python: as RLlib
    restores it, with the actors of its config.
    """
    from rllib_llm.algorithm.grpo import GRPO

    directory = find_experiment(checkpoint)
    if directory is None:
        algorithm = GRPO.from_checkpoint(str(checkpoint))
        if prompts is not None:
            algorithm.config._is_frozen = False
            algorithm.config.evaluation_duration = prompts
        return algorithm
    experiment = load_experiment(directory / EXPERIMENT_FILE)
    config = experiment.to_grpo_config()
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    config.evaluation(
        evaluation_interval=None,
        evaluation_num_env_runners=0,
        evaluation_duration=prompts or experiment.evaluation.prompts,
    )
    algorithm = config.build_algo()
    algorithm.restore_from_path(str(checkpoint))
    return algorithm
