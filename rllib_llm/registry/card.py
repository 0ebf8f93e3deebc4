"""The text on a registered model's page: what it is, where it comes from, how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_policies import Plan, PrecisionPolicy
from rllib_llm.registry.fp8_format import has_fp8_rollout, serving_obstacles

__all__ = ["headline_metrics", "model_card"]

# metric as the run has it -> how it is called on the page
_METRICS = {
    "env_runners/episode_return_mean": "mean reward (training)",
    "evaluation/env_runners/episode_return_mean": "mean reward (held out)",
    "env_runners/response_length_mean": "mean answer (tokens)",
    "mismatch/k3": "train-rollout mismatch, k3",
    "mismatch/max_abs": "train-rollout mismatch, largest Δlogp",
    "mismatch/bit_equal_share": "bit-equal tokens",
}
_LINEAGE = {
    "base_model": "trained from",
    "run_id": "MLflow run",
    "run_name": "run name",
    "checkpoint": "checkpoint",
    "training_iteration": "training iteration",
    "weights_version": "weights version",
    "git_commit": "commit of the training code",
    "adapter": "trained with adapters",
    "base_hash": "hash of the base that they are on",
}


def headline_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Label -> value of the metrics that a reader looks for first, those that were measured."""
    return {label: f"{metrics[key]:.4g}" for key, label in _METRICS.items() if key in metrics}


def model_card(
    policy: PrecisionPolicy,
    plan: Plan,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, float],
    parameters: int,
) -> str:
    """Markdown."""
    formats = policy.linear
    facts = {
        "architecture": f"{plan.model_type}, {parameters:,} parameters",
        "precision policy": f"`{policy.name}` (fingerprint `{policy.fingerprint[:16]}`)",
        "rollout / training forward": f"{formats.rollout_forward} / {formats.train_forward}",
        "exactly on-policy": "yes" if policy.exactly_on_policy else "no",
        **headline_metrics(metrics),
        **{
            label: f"`{lineage[key]}`"
            for key, label in _LINEAGE.items()
            if lineage.get(key) not in (None, "")
        },
    }
    lines = [f"Trained with rllib_llm under the precision policy `{policy.name}`.", "", "| | |", "|---|---|"]
    lines += [
        f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items()
    ]  # | ends a cell
    return "\n".join([*lines, "", *_usage(policy, plan, lineage.get("merge")), ""])


def _usage(policy: PrecisionPolicy, plan: Plan, merge: Mapping[str, Any] | None) -> list[str]:
    if merge:
        lost = f"{merge['lost_in_compute_dtype']:.1%} of the updated elements in `hf/`"
        lost += f", {merge['lost_in_fp8']:.1%} in `fp8/`" if merge["lost_in_fp8"] is not None else ""
        other = (
            "`adapter/` holds the adapters as PEFT reads them. The other folders are merged with them, which loses "
            f"{lost}: what was trained is the base with the adapters beside it."
        )
    elif has_fp8_rollout(plan):
        other = (
            "`fp8/` holds the bytes that the rollout engine computed with, in the standard block-FP8 format (stock "
            "vLLM reads it)."
        )
    else:
        other = "The rollout computed with the same values."
    lines = [
        f"`hf/` holds the master weights in {policy.compute_dtype} (transformers reads it). {other}",
        "",
        "Use it as `model: models:/NAME@ALIAS` in an experiment, by `mlflow.pyfunc.load_model`, or write a directory "
        "to serve with `rllib-llm models export NAME@ALIAS DIR`. Another policy than its own is refused.",
    ]
    obstacles = serving_obstacles(plan, policy)
    return [*lines, "", "Stock vLLM on `fp8/`:", *(f"* {text}" for text in obstacles)] if obstacles else lines
