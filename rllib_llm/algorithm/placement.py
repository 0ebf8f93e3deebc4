"""Whether Ray can ever place a trial. Tune waits for ever for what no node has, and says so only in a log line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_llm.errors import InputError, RllibLLMError

__all__ = [
    "PlacementError",
    "cluster_may_grow",
    "node_resources",
    "placement_problems",
    "require_placeable",
    "with_engine",
]


class PlacementError(RllibLLMError, InputError, ValueError):
    """A trial asks for what no node of the cluster has; `.problems` holds one sentence per problem."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = [f"  {i}. {text}" for i, text in enumerate(problems, 1)]
        super().__init__("\n".join(["the trial can never be placed:", *lines]))


def placement_problems(
    bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]
) -> list[str]:
    """One sentence per resource that all nodes together lack, and per bundle that no single node can hold.

    bundles: what each process of a trial asks for, the trainer first. nodes: all resources of each node, free or not:
    what others use now may become free.
    """
    problems = []
    for name in dict.fromkeys(name for bundle in bundles for name in bundle):
        asked = sum(bundle.get(name, 0.0) for bundle in bundles)
        there = sum(node.get(name, 0.0) for node in nodes)
        if asked > there:
            problems.append(f"{name}: {asked:g} asked for, {there:g} there ({_ways(name)}).")
    if problems:
        return problems
    for bundle in {tuple(sorted(bundle.items())): bundle for bundle in bundles}.values():
        if not any(all(node.get(n, 0.0) >= amount for n, amount in bundle.items()) for node in nodes):
            has = "; ".join(_text(node) for node in nodes)
            problems.append(
                f"one process asks for {_text(bundle)}, no single node has that (nodes: {has}). Ask for less per "
                "process, and for more processes."
            )
    return problems


def require_placeable(bundles: Sequence[Mapping[str, float]]) -> None:
    """Raise PlacementError where the Ray that runs now can never place these bundles; nothing without a Ray, or where
    the cluster may grow."""
    import ray

    if not ray.is_initialized() or cluster_may_grow():
        return
    if problems := placement_problems(bundles, node_resources()):
        raise PlacementError(problems)


def node_resources() -> list[dict[str, float]]:
    """All resources of each living node of the cluster."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def cluster_may_grow() -> bool:
    """Whether an autoscaler may add nodes: Ray's launcher leaves a file, KubeRay a variable, on the head node."""
    return (
        Path("~/ray_bootstrap_config.yaml").expanduser().exists() or "KUBERAY_GEN_RAY_START_CMD" in os.environ
    )


def with_engine(config: Any, bundles: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """RLlib's bundles with the GPUs of an engine that lives in the trainer's process, which RLlib does not count.

    Raises PlacementError where the engine would see no GPU although it is told to use one (Ray hides the GPUs from a
    process that asks for none), or would wait for resources beside those of its env runner.
    """
    out = [dict(bundle) for bundle in bundles]
    if config.num_env_runners == 0 and config.num_gpus_per_env_runner:
        out[0]["GPU"] = out[0].get("GPU", 0.0) + config.num_gpus_per_env_runner
    options, problems = config.rollout["engine_options"], []
    inside = config.num_env_runners == 0
    gpus = out[0].get("GPU", 0.0) if inside else config.num_gpus_per_env_runner
    if str(options.get("device", "")).startswith("cuda") and not gpus:
        where = "the trainer's process, which" if inside else "env runners, each of which"
        problems.append(
            f"rollout.engine_options.device = {options['device']!r}: the engine is in {where} asks Ray for no "
            "GPU and would see none. Set num_gpus_per_env_runner (run.resources.gpus_per_env_runner), or device cpu."
        )
    for name in ("num_gpus", "num_cpus"):
        if options.get(name):
            problems.append(
                f"rollout.engine_options.{name} = {options[name]!r}: inside a trial the engine's process would "
                f"wait for these beside those of its env runner. Use {name}_per_env_runner (run.resources) instead."
            )
    if problems:
        raise PlacementError(problems)
    return out


def _ways(name: str) -> str:
    if name == "GPU":
        return (
            "num_gpus_per_env_runner × env runners + num_gpus_per_learner × learners; run.resources in a file"
        )
    if name == "CPU":
        return "trainer, env runners and learners together; run.resources in a file, or ray.init(num_cpus=…)"
    return "custom resources of the config"


def _text(bundle: Mapping[str, float]) -> str:
    shown = {n: a for n, a in bundle.items() if a and not n.startswith(("node:", "object_store", "memory"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
