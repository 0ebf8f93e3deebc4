"""The probe names the first module whose output differs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rllib_llm.mismatch import first_difference, probe
from rllib_llm.mismatch.layers import compare_outputs


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def test_equal_models_differ_nowhere() -> None:
    """All modules in execution order, all bit-equal."""
    m, x = model(), torch.randn(5, 8)
    got = probe(m, copy.deepcopy(m), lambda side: side(x))
    assert [layer.module for layer in got] == ["0", "1", "2", "3", "4"]
    assert all(layer.bit_equal_share == 1.0 and layer.max_abs == layer.relative == 0.0 for layer in got)
    assert first_difference(got) == ""


def test_a_stale_layer_is_the_first_difference() -> None:
    """One weight of layer 2 changed by 0.5: layers 0 and 1 stay equal, 2 is named, later ones inherit."""
    train, x = model(), torch.ones(5, 8)
    rollout = copy.deepcopy(train)
    with torch.no_grad():
        train[2].weight[3, 0] += 0.5
    got = {layer.module: layer for layer in probe(train, rollout, lambda side: side(x))}
    assert got["1"].bit_equal_share == 1.0
    assert got["2"].bit_equal_share == pytest.approx(7 / 8)
    assert got["4"].max_abs > 0
    assert first_difference(list(got.values())) == "2"


def test_hand_worked_comparison() -> None:
    """Delta = (0, 0 | 3, -4) against (1, 0 | 0, 0): max 4 in row 1, mean 7/4, relative 5."""
    got = compare_outputs(
        "x", torch.tensor([[1.0, 0.0], [3.0, -4.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    )
    assert (got.max_abs, got.mean_abs, got.relative, got.bit_equal_share, got.worst_row) == (
        4,
        1.75,
        5,
        0.5,
        1,
    )


def test_hooks_are_gone_afterwards_and_no_graph_is_kept() -> None:
    """The probe leaves the models as they were, also when the forward fails."""
    m = model()

    def broken(side: nn.Module) -> None:
        side(torch.randn(1, 8))
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        probe(m, m, broken)
    assert all(not module._forward_hooks for module in m.modules())


def test_missing_modules_and_shapes_are_refused() -> None:
    """An unknown name, and sides fed different tokens."""
    m, x = model(), torch.randn(5, 8)
    with pytest.raises(ValueError, match=r"\['decoder'\]"):
        probe(m, m, lambda side: side(x), modules=["0", "decoder"])
    rows = iter((5, 4))
    with pytest.raises(ValueError, match=r"\(5, 8\) in training and \(4, 8\) in rollout"):
        probe(m, copy.deepcopy(m), lambda side: side(x[: next(rows)]), modules=["0"])
