"""Evaluate a checkpoint on held-out prompts, in this process, under the policy it was written with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rllib_llm.cli import table
from rllib_llm.experiment.file import load_experiment
from rllib_llm.on_disk.checkpoint import CheckpointError, read_metadata, verify_files
from rllib_llm.on_disk.directories import EXPERIMENT_FILE, find_checkpoint, find_experiment
from rllib_llm.tracking.entries import metrics_of

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.algorithm.grpo import GRPO

# metric of evaluation/env_runners -> how it is called in the table
_SHOWN = {
    "episode_return_mean": "mean reward",
    "solved_share": "solved",
    "num_episodes": "answers",
    "response_length_mean": "mean length (tokens)",
    "truncated_share": "cut off by length",
    "tokens_per_s": "tokens/s",
}


def evaluate_checkpoint(path: Path, prompts: int | None) -> str:
    """The table of one evaluation.

    path: a checkpoint, or a directory with some (the furthest trained is taken). prompts: held-out prompts, None for
    as many as the checkpoint's config says.

    Raises DirectoryError where there is no complete checkpoint, CheckpointError for one that cannot be evaluated.
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


def _restore(checkpoint: Path, prompts: int | None) -> GRPO:
    """The Algorithm of a checkpoint, in this process, without actors. Nothing in the checkpoint is unpickled.

    Its config is that of the experiment.yaml of `rllib-llm train`; of Tune or Python, what the checkpoint's metadata
    say of it as plain data.
    """
    verify_files(str(checkpoint))
    directory = find_experiment(checkpoint)
    if directory is None:
        config = _saved_config(checkpoint)
        prompts = prompts or config.evaluation_duration
    else:
        experiment = load_experiment(directory / EXPERIMENT_FILE)
        config, prompts = experiment.to_grpo_config(), prompts or experiment.evaluation.prompts
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    config.evaluation(evaluation_interval=None, evaluation_num_env_runners=0, evaluation_duration=prompts)
    algorithm: GRPO = config.build_algo()
    algorithm.restore_from_path(str(checkpoint))
    return algorithm


def _saved_config(checkpoint: Path) -> GRPOConfig:
    from rllib_llm.algorithm.config import GRPOConfig

    saved = read_metadata(str(checkpoint))
    plain, objects = saved.get("config"), saved.get("config_objects")
    if not isinstance(plain, dict) or not isinstance(objects, list):
        raise CheckpointError(f"checkpoint {checkpoint} does not say what it was configured with")
    env = plain.get("env")
    if "env" in objects or (isinstance(env, str) and env.startswith("__main__:")):
        raise CheckpointError(
            f"checkpoint {checkpoint}: its environment is a class of a script, which only a pickle could bring back. "
            "Give the environment as 'package.module:Class', or evaluate in Python: "
            f"GRPO.from_checkpoint({str(checkpoint)!r}).evaluate(), if you trust who wrote it (docs/checkpoints.md)."
        )
    return GRPOConfig().update_from_dict(plain)
