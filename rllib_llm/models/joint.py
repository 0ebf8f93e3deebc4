"""Projections of one input as one GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from precision_kernels import (
    Coded,
    JointWeight,
    PreparedWeight,
    Quantised,
    Recompute,
    joinable,
    linears,
    linears_of_codes,
    prepare_joint,
    rows_of_one,
)
from rllib_llm.models.layers import PlannedLinear


class JointProjections:
    """Projections of one input (q, k, v or gate, up): x is quantised and saved once, and one GEMM serves all.

    That GEMM reads the weights one below the other, so every weight must have a multiple of 128 rows; else they are
    multiplied one by one. The bits are those of each alone. On the rollout side the modules' buffers are rows of
    one tensor, on the train side the operands are. The modules must have one set of formats; a plan never splits
    such a group.
    """

    def __init__(self, modules: Sequence[PlannedLinear]) -> None:
        self.modules = tuple(modules)
        self._prepared: tuple[tuple[Any, ...], JointWeight, list[torch.Tensor]] | None = None
        self.joined = joinable([m.plan.shape for m in self.modules])
        if self.joined:
            for module in self.modules:
                module.joint = self
            self._join_buffers()

    def __getstate__(self) -> dict[str, Any]:
        """As `PlannedLinear.__getstate__`."""
        return self.__dict__ | {"_prepared": None}

    def __call__(
        self, x: torch.Tensor | Quantised | Coded, recompute: Recompute | None = None
    ) -> tuple[torch.Tensor, ...]:
        """[T, K], or its codes -> [T, Ni] of every module, column slices of one matrix if they are joined.

        ``recompute`` as in `linears`.
        """
        prepared = self.prepared() if self.joined else [m.prepared() for m in self.modules]
        biases = [m.bias for m in self.modules]
        if isinstance(x, Quantised):
            return linears_of_codes(x, prepared, biases, self.modules[0].compute_dtype)
        codes = None
        if isinstance(x, Coded):
            x, codes, recompute = x
        weights = [m._operand() for m in self.modules]
        outputs = linears(x, weights, biases, self.modules[0].formats, prepared, codes, recompute=recompute)
        return tuple(m.adapted(y, x, recompute) for m, y in zip(self.modules, outputs, strict=True))

    def prepared(self) -> JointWeight:
        """All weights as their one GEMM reads them; made as often as `PlannedLinear.prepared`."""
        key = tuple(m.weight_key(m.weight) for m in self.modules)
        if self._prepared is None or self._prepared[0] != key:
            self._join_buffers()
            first = self.modules[0]
            weights: list[torch.Tensor] = [m.weight for m in self.modules]
            sources = [m.source(w) for m, w in zip(self.modules, weights, strict=True)]
            joint = prepare_joint(sources, first.formats, first.compute_dtype)
            key = tuple(m.weight_key(m.weight) for m in self.modules)
            self._prepared = (key, joint, weights)
        return self._prepared[1]

    def part(self, module: PlannedLinear) -> PreparedWeight:
        """The one of `prepared` that is `module`'s."""
        return self.prepared().parts[self.modules.index(module)]

    def forget_operands(self) -> None:
        self._prepared = None

    def _join_buffers(self) -> None:
        """Make weights that are not trained rows of one tensor; after `Module.to` they no longer are."""
        if self.modules[0].side == "train" and not self.modules[0].frozen:
            return
        for suffix in self.modules[0]._buffers:
            if suffix == "bias":
                continue
            buffers = [getattr(m, suffix) for m in self.modules]
            if rows_of_one(buffers) is None:
                rows = torch.cat(buffers).split([b.shape[0] for b in buffers])
                for module, part in zip(self.modules, rows, strict=True):
                    module._buffers[suffix] = part
