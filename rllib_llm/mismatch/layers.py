"""Which layer makes the difference? One probe batch through both models, module by module, on request.

Costs a forward of each side and keeps every compared output, so it is a tool for a few hundred tokens, not
for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerMismatch:
    """One module's output on both sides, Delta = train - rollout, over all elements.

    relative: ||Delta|| / ||rollout|| (Frobenius; ||Delta|| when the rollout's output is zero). worst_row:
    index of the token (first dimension) that holds max_abs. input_bit_equal_share: the same share for what
    went in (1 for a module without a tensor input).
    """

    module: str
    max_abs: float
    mean_abs: float
    relative: float
    bit_equal_share: float
    worst_row: int
    input_bit_equal_share: float = 1.0


@dataclass
class Recorded:
    """What captured_outputs keeps of one module: its output and, where it is a tensor, its first input."""

    output: Tensor
    input: Tensor | None

    def cpu(self) -> Recorded:
        return Recorded(self.output.cpu(), None if self.input is None else self.input.cpu())


def probe(
    train_model: nn.Module,
    rollout_model: nn.Module,
    forward: Callable[[nn.Module], Any],
    modules: Sequence[str] | None = None,
) -> list[LayerMismatch]:
    """Runs `forward(model)` without grad on each side and compares module outputs in execution order.

    forward: say `lambda m: m(batch)`; must feed both sides the same tokens. modules: names to compare,
    default every named module whose output is a floating tensor on both sides. `first_difference`
    says where the sides part. Raises ValueError when a name is missing on one side, or shapes differ.
    """
    return compare_captures(
        capture(train_model, forward, modules), capture(rollout_model, forward, modules), modules
    )


def capture(
    model: nn.Module, forward: Callable[[nn.Module], Any], modules: Sequence[str] | None = None
) -> dict[str, Recorded]:
    """One side of `probe`, on the CPU, for sides that live in different processes; see `compare_captures`."""
    with torch.no_grad(), captured_outputs(model, modules) as outputs:
        forward(model)
    return {name: recorded.cpu() for name, recorded in outputs.items()}


def compare_captures(
    train: Mapping[str, Recorded], rollout: Mapping[str, Recorded], modules: Sequence[str] | None = None
) -> list[LayerMismatch]:
    """Compares two `capture`s of the same tokens; raises as `probe`."""
    wanted = list(modules) if modules is not None else [name for name in train if name in rollout]
    missing = [name for name in wanted if name not in train or name not in rollout]
    if missing or not wanted:
        raise ValueError(
            f"mismatch.probe: no comparable output of {missing or 'any module'} on both sides; outputs were "
            f"seen of {sorted(train.keys() | rollout.keys())[:20]}. Name modules that return one floating tensor."
        )
    return [_compare(name, train[name], rollout[name]) for name in train if name in wanted]


def _compare(name: str, train: Recorded, rollout: Recorded) -> LayerMismatch:
    found = compare_outputs(name, train.output, rollout.output)
    if train.input is None or rollout.input is None or train.input.shape != rollout.input.shape:
        return found
    equal = (train.input == rollout.input).double()
    return replace(found, input_bit_equal_share=float(equal.mean()) if equal.numel() else 1.0)


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
def captured_outputs(model: nn.Module, modules: Sequence[str] | None = None) -> Iterator[dict[str, Recorded]]:
    """While open, records a copy of each module's last floating output (of a tuple, its first) and input.

    In the order in which modules first finish: children before parents.
    """
    outputs: dict[str, Recorded] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            if isinstance(output, Tensor) and output.is_floating_point():
                first = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
                outputs[name] = Recorded(
                    output.detach().clone(), None if first is None else first.detach().clone()
                )

        return record

    named = [(name, m) for name, m in model.named_modules() if name and (modules is None or name in modules)]
    handles = [module.register_forward_hook(hook(name)) for name, module in named]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_difference(layers: Sequence[LayerMismatch]) -> str:
    """Where the sides part: the first (innermost) module with bit-equal input and different output.

    If a difference comes from outside every compared module, the first with a different output; "" if all
    are equal. Modules that a model does not call (projections it computes jointly) show as their parent.
    """
    different = [layer for layer in layers if layer.bit_equal_share < 1.0]
    own = [layer for layer in different if layer.input_bit_equal_share == 1.0]
    return (own or different)[0].module if different else ""
