"""Sums and counts of an iteration's metrics, over micro-batches, optimiser steps and learners."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rllib_llm.learner.collective import Collective

__all__ = ["Tally"]


class Tally:
    """name -> (sum, count). A count of 0 in the end means that the metric is the plain sum."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, Any]] = {}

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        """Tensors stay on their device until `merged`: reading one here would wait for the GPU in every micro-batch."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + total, old_count + count)

    def copy(self) -> Tally:
        """As it stands now."""
        other = Tally()
        other._sums = dict(self._sums)
        return other

    def merged(self, collective: Collective, equal_on_all: Collection[str]) -> dict[str, float]:
        """sum / count over all learners, the same on each; metrics in `equal_on_all` are taken once, not added."""
        own = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        merged: dict[str, tuple[float, float]] = {}
        for sums in collective.gather(own):
            for name, (total, count) in sums.items():
                old = (0.0, 0.0) if name in equal_on_all else merged.get(name, (0.0, 0.0))
                merged[name] = (old[0] + total, old[1] + count)
        return {name: total / count if count else total for name, (total, count) in merged.items()}
