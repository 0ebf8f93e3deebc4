"""Which layer makes the difference? One probe batch through both models, module by module, on request.

Costs a forward of each side and keeps every compared output, so it is a tool for a few hundred tokens, not
for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerMismatch:
    """One module's output on both sides, Delta = train - rollout. relative: ||Delta|| / ||rollout||
    (Frobenius, 0 for two zero outputs). worst_row: index of the token (first dimension) that holds max_abs."""

    module: str
    max_abs: float
    mean_abs: float
    relative: float
    bit_equal_share: float
    worst_row: int


def probe(
    train_model: nn.Module,
    rollout_model: nn.Module,
    forward: Callable[[nn.Module], Any],
    modules: Sequence[str] | None = None,
) -> list[LayerMismatch]:
    """Runs `forward(model)` without grad on each side and compares the outputs of their modules, in
    execution order.

    forward: say `lambda m: m(batch)`; must feed both sides the same tokens. modules: names to compare,
    default every named module whose output is a floating tensor on both sides. The first entry with
    bit_equal_share < 1 is where the sides part. Raises ValueError when a name is missing on one side, or
    shapes differ.
    """
    with torch.no_grad():
        with captured_outputs(train_model, modules) as train:
            forward(train_model)
        with captured_outputs(rollout_model, modules) as rollout:
            forward(rollout_model)
    wanted = list(modules) if modules is not None else [name for name in train if name in rollout]
    missing = [name for name in wanted if name not in train or name not in rollout]
    if missing or not wanted:
        raise ValueError(
            f"mismatch.probe: no comparable output of {missing or 'any module'} on both sides; outputs were "
            f"seen of {sorted(train.keys() | rollout.keys())[:20]}. Name modules that return one floating tensor."
        )
    order = [name for name in train if name in wanted]
    return [compare_outputs(name, train[name], rollout[name]) for name in order]


def compare_outputs(module: str, train: Tensor, rollout: Tensor) -> LayerMismatch:
    """Compares two outputs of any one shape [rows, ...] in fp64. NaN counts as different."""
    if train.shape != rollout.shape:
        raise ValueError(
            f"mismatch.probe: {module} gives {tuple(train.shape)} in training and {tuple(rollout.shape)} in "
            "rollout; feed both sides the same packed tokens."
        )
    a, b = train.double().flatten(), rollout.double().flatten()
    delta = (a - b).abs()
    if delta.numel() == 0:
        return LayerMismatch(module, 0.0, 0.0, 0.0, 1.0, 0)
    norm, scale = delta.norm(), b.norm()
    worst = int(delta.argmax())
    return LayerMismatch(
        module=module,
        max_abs=float(delta.max()),
        mean_abs=float(delta.mean()),
        relative=float(norm / scale) if scale > 0 else float(norm),
        bit_equal_share=float((a == b).double().mean()),
        worst_row=worst // max(1, delta.numel() // max(1, train.shape[0])) if train.ndim else 0,
    )


@contextmanager
def captured_outputs(model: nn.Module, modules: Sequence[str] | None = None) -> Iterator[dict[str, Tensor]]:
    """While open, records a copy of each module's (last) floating tensor output, in order of first
    execution."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs[name] = output.detach().clone()

        return record

    named = [(name, m) for name, m in model.named_modules() if name and (modules is None or name in modules)]
    handles = [module.register_forward_hook(hook(name)) for name, module in named]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_difference(layers: Sequence[LayerMismatch]) -> str:
    """The name of the first module, in execution order, whose outputs are not bit-equal; "" if all are."""
    return next((layer.module for layer in layers if layer.bit_equal_share < 1.0), "")
