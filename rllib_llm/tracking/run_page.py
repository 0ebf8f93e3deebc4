"""What MLflow's page of a run shows first: headline metrics, a description, the task as a data set, telling names.

MLflow (3.17, looked at in Chromium) groups charts by what stands before the slash of a metric and shows the groups by
the alphabet; what is called ``system/…`` has a tab of its own. So the numbers that every reader looks for are repeated
in a group that comes first, ``at_a_glance/…``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rllib_llm.tracking import entries

__all__ = [
    "HEADLINES",
    "bins_table",
    "describe",
    "inputs_of",
    "outcome",
    "page_metrics",
    "start_metrics",
    "trial_name",
]

HEADLINES = {
    "at_a_glance/reward": "env_runners/episode_return_mean",
    "at_a_glance/held_out_reward": "evaluation/env_runners/episode_return_mean",
    "at_a_glance/mismatch_k3": "mismatch/k3",
    "at_a_glance/mismatch_max_abs": "mismatch/max_abs",
    "at_a_glance/bit_equal_share": "mismatch/bit_equal_share",
    "at_a_glance/tokens_per_s": "throughput/iteration_tokens_per_s",
    "at_a_glance/loss": "learners/default_policy/loss",
}
"""Name on the page -> the metric of a result that it repeats."""
_REWARD, _HELD_OUT = list(HEADLINES.items())[:2]

_SYSTEM = {
    "perf/cpu_util_percent": "system/cpu_utilization_percentage",
    "perf/ram_util_percent": "system/system_memory_usage_percentage",
}
_TIMES = ("time_this_iter_s", "time_total_s")
_AT_START = "evaluation_at_start/"
_BINS = ("mismatch/by_", "correction/by_")


def page_metrics(values: Mapping[str, float], *, detail: bool = False) -> dict[str, float]:
    """The metrics of one iteration by their names on the page. values: `entries.metrics_of` a result.

    Left out: bins (``mismatch/by_…``; a table has them) unless ``detail``, and the evaluation before the first update,
    which belongs to step 0 (`start_metrics`).
    """
    page = {name: values[key] for name, key in HEADLINES.items() if key in values}
    for key, value in values.items():
        if key.startswith(_AT_START) or (key.startswith(_BINS) and not detail):
            continue
        page[_on_page(key)] = value
    return page


def _on_page(key: str) -> str:
    """``num_samples_refused`` is ``counters/num_samples_refused``: what has no group gets one."""
    if key in _SYSTEM:
        return _SYSTEM[key]
    if "/" in key:
        return key
    return f"{'timers' if key in _TIMES else 'counters'}/{key}"


def start_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics of step 0: the evaluation before the first update, which the first result brings along."""
    found = {
        f"evaluation/{key.removeprefix(_AT_START)}": value
        for key, value in values.items()
        if key.startswith(_AT_START)
    }
    name, key = _HELD_OUT
    return ({name: found[key]} if key in found else {}) | found


def bins_table(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[Any]]:
    """Columns ``iteration``, ``by``, ``bin``, then one per metric, of iterations (step, values); empty without bins."""
    rows: dict[tuple[int, str, str], dict[str, float]] = {}
    for step, values in history:
        for key, value in values.items():
            if key.startswith(_BINS):
                group, by, *names, metric = key.split("/")
                rows.setdefault((step, f"{group} {by.replace('_', ' ')}", "/".join(names)), {})[metric] = (
                    value
                )
    metrics = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    if not rows:
        return {}
    columns: dict[str, list[Any]] = {
        "iteration": [step for step, _, _ in rows],
        "by": [by for _, by, _ in rows],
        "bin": [name for _, _, name in rows],
    }
    return columns | {metric: [row.get(metric) for row in rows.values()] for metric in metrics}


def trial_name(searched: Mapping[str, Any], otherwise: str) -> str:
    """``lr=0.0001 policy=bf16``: what was searched, by the last part of its name where that tells; 120 characters."""
    flat = entries.params_of(searched)
    if not flat:
        return otherwise
    last = [key.rpartition(".")[2] for key in flat]
    names = [short if last.count(short) == 1 else key for key, short in zip(flat, last, strict=True)]
    return entries.cut(
        " ".join(f"{name}={value}" for name, value in zip(names, flat.values(), strict=True)), 120
    )


def describe(config: Mapping[str, Any]) -> str:
    """One sentence, in Markdown, of what a trial trains; of what its config does not say nothing is said."""
    loss, model = _at(config, "train", "loss"), _at(config, "model", "path")
    policy = _at(config, "precision", "policy")
    parts = [f"**{loss or 'training'}**"]
    parts += [f"of `{PurePath(str(model)).name}`"] if model else []
    parts += [f"on `{task}`"] if (task := _task(config)) else []
    if policy:
        parts.append(
            f"under precision policy `{policy if isinstance(policy, str) else policy.get('name', 'own')}`"
        )
    return " ".join(parts) + "." if len(parts) > 1 else ""


def outcome(history: Sequence[tuple[int, Mapping[str, float]]]) -> list[str]:
    """Sentences, in Markdown, on what the iterations (step, values) reached."""
    sentences = []
    for title, (_, key) in (("Reward", _REWARD), ("Held-out reward", _HELD_OUT)):
        points = [(step, values[key]) for step, values in history if key in values]
        if key == _HELD_OUT[1]:
            starts = [start_metrics(values) for _, values in history]
            points = [(0, start[key]) for start in starts if key in start] + points
        if points:
            (first, before), (last, after) = points[0], points[-1]
            sentences.append(f"{title} **{before:.3f} → {after:.3f}** (iteration {first} → {last}).")
    largest = [values["mismatch/max_abs"] for _, values in history if "mismatch/max_abs" in values]
    if largest:
        sentences.append(f"Largest train–rollout difference of a log-probability: **{max(largest):.3g}**.")
    return sentences


def inputs_of(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """The task as MLflow data sets: one for training, one for evaluation where there is one; empty without a task.

    Each has name, digest (of the task's whole configuration), source_type, source (JSON) and context.
    """
    if not (name := _task(config)):
        return []
    source = json.dumps(
        {"env": _env(config), "config": entries.jsonable(_env_config(config))}, sort_keys=True
    )
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    evaluates = config.get("evaluation_interval") or _at(config, "evaluation", "interval")
    contexts = ["training", *(["evaluation"] if evaluates else [])]
    return [
        {"name": name, "digest": digest, "source_type": "rllib_llm_env", "source": source, "context": context}
        for context in contexts
    ]


def _env(config: Mapping[str, Any]) -> str:
    """Name of the environment, of a trial's RLlib config or an experiment's."""
    env = config.get("env")
    return str(env.get("name", "")) if isinstance(env, Mapping) else entries.as_text(env or "")


def _env_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    env = config.get("env")
    found = env.get("config") if isinstance(env, Mapping) else config.get("env_config")
    return found if isinstance(found, Mapping) else {}


def _task(config: Mapping[str, Any]) -> str:
    name, settings = _env(config), _env_config(config)
    detail = settings.get("task") or (PurePath(str(settings["path"])).name if settings.get("path") else "")
    return f"{name} {detail}".strip() if name else ""


def _at(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, Mapping) else None
