"""Trials that Ray can never place are errors with numbers; those that it can are left alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import GRPO
from rllib_llm.algorithm.placement import PlacementError, placement_problems, require_placeable

Make = Callable[..., Any]
NODE = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0}


@pytest.mark.parametrize(
    ("bundles", "nodes"),
    [
        ([{"CPU": 8, "GPU": 2}], [NODE]),
        ([{"CPU": 1}] + [{"CPU": 1, "GPU": 1}] * 4, [NODE, NODE]),
        ([{"CPU": 0.5, "GPU": 0.5}] * 4, [NODE]),
        ([{}], [NODE]),
    ],
)
def test_what_fits_is_no_problem(bundles: list, nodes: list) -> None:
    """Whole and fractional requests that some node, or the nodes together, hold."""
    assert placement_problems(bundles, nodes) == []


def test_what_all_nodes_lack_is_said_in_numbers() -> None:
    """Each resource that is short: asked for, there, and which settings add up to it."""
    problems = placement_problems([{"CPU": 1}] + [{"CPU": 4, "GPU": 1, "tpu": 1}] * 3, [NODE])
    assert [text.split(" (")[0] for text in problems] == [
        "CPU: 13 asked for, 8 there",
        "GPU: 3 asked for, 2 there",
        "tpu: 3 asked for, 0 there",
    ]
    assert "num_gpus_per_env_runner" in problems[1]


def test_a_process_larger_than_every_node_is_named() -> None:
    """Four GPUs are there, two on each of two nodes: no process can have three."""
    [problem] = placement_problems([{"CPU": 1}, {"CPU": 1, "GPU": 3}], [NODE, NODE])
    assert "one process asks for 1 CPU, 3 GPU, no single node has that" in problem
    assert "nodes: 8 CPU, 2 GPU; 8 CPU, 2 GPU" in problem


def test_an_engine_in_the_trainers_process_gets_its_gpu(toy_config: Make) -> None:
    """RLlib counts no GPU of a local env runner; the trial's first bundle has learner's and engine's share together."""
    config = toy_config(engine_options={"device": "cuda"})
    config.env_runners(num_env_runners=0, num_gpus_per_env_runner=0.5).learners(num_gpus_per_learner=0.5)
    config.resources(num_cpus_for_main_process=1)
    [bundle] = _request(config)
    assert bundle == {"CPU": 1, "GPU": 1.0}
    config.env_runners(num_env_runners=2, num_gpus_per_env_runner=1)
    assert [b.get("GPU", 0) for b in _request(config)] == [0.5, 1, 1]


@pytest.mark.parametrize(("runners", "where"), [(0, "the trainer's process"), (2, "env runners")])
def test_an_engine_that_would_see_no_gpu_is_refused(toy_config: Make, runners: int, where: str) -> None:
    """Ray hides GPUs from a process that asks for none; CUDA's own error would come minutes later, from an actor."""
    config = toy_config(engine_options={"device": "cuda"}).env_runners(num_env_runners=runners)
    with pytest.raises(
        PlacementError, match=rf"device = 'cuda': the engine is in {where}.*asks Ray for no GPU"
    ):
        _request(config)


def test_resources_that_an_engine_would_wait_for_are_refused(toy_config: Make) -> None:
    """An engine's own actor gets nothing inside a trial that its env runner has not reserved."""
    config = toy_config(engine_options={"num_gpus": 1, "num_cpus": 2}).env_runners(num_env_runners=1)
    with pytest.raises(PlacementError) as caught:
        _request(config)
    assert len(caught.value.problems) == 2
    assert "num_gpus_per_env_runner" in str(caught.value)


def test_tune_does_not_wait_for_what_no_node_has(toy_config: Make, ray_session: Any, tmp_path: Any) -> None:
    """tune.run with GPU engines on a machine without GPUs ends at once, with what was asked for and what exists."""
    from ray import tune

    config = toy_config().env_runners(num_env_runners=2, num_gpus_per_env_runner=64)
    with pytest.raises(PlacementError, match=r"GPU: 128 asked for, \d there"):
        tune.run(GRPO, config=config, storage_path=str(tmp_path), verbose=0)


def test_a_cluster_that_may_grow_is_asked(ray_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an autoscaler the nodes of now are no limit."""
    bundles = [{"GPU": 64.0}]
    with pytest.raises(PlacementError):
        require_placeable(bundles)
    monkeypatch.setitem(os.environ, "KUBERAY_GEN_RAY_START_CMD", "ray start --head")
    require_placeable(bundles)


def _request(config: Any) -> list[dict[str, float]]:
    """Bundles of a trial, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllib_llm.algorithm.grpo.require_placeable", lambda bundles: None)
        return GRPO.default_resource_request(config.to_dict()).bundles
