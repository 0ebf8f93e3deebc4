"""The layer probe across the real learner and the real env runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rllib_llm.algorithm.probe import probe_layers, probe_operators
from rllib_llm.mismatch import first_difference

Make = Callable[..., Any]
SEQUENCES = [[0, 1, 2, 10, 3], [5, 10, 5]]


def test_the_probe_finds_nothing_in_a_healthy_run_and_the_layer_in_a_broken_one(build: Make) -> None:
    """After an iteration every module is bit-equal; one row of a norm changed in the engine is found as that layer."""
    algo = build()
    algo.train()
    [(runner, layers)] = probe_layers(algo, SEQUENCES).items()
    assert len(layers) > 5
    assert first_difference(layers) == ""
    engine = algo.env_runner.engine
    with torch.no_grad():
        engine.model.model.layers[1].self_attn.o_proj.weight.view(torch.uint8)[0, 0] ^= 0x40
    engine.model.forget_operands()
    assert first_difference(probe_layers(algo, SEQUENCES)[runner]) == "model.layers.1.self_attn.o_proj"


def test_the_operator_probe_names_the_weight_that_a_runner_holds_wrong(build: Make) -> None:
    """The same by operator: equal after an iteration with its update, then the stale projection and its name."""
    algo = build()
    algo.train()
    [(runner, found)] = probe_operators(algo, SEQUENCES).items()
    assert found.equal
    assert len(found.comparisons) > 20
    engine = algo.env_runner.engine
    with torch.no_grad():
        engine.model.model.layers[1].mlp.up_proj.weight.view(torch.uint8)[0, 0] ^= 0x40
    engine.model.forget_operands()
    found = probe_operators(algo, SEQUENCES)[runner]
    assert found.first is not None
    assert found.first.site == "model.layers.1.mlp.up_proj"
    assert found.evidence[0].endswith("model.layers.1.mlp.up_proj.weight")
