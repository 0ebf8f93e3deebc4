"""Is G_infer a subgraph of the forward part of G_train? Every edge that says no."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .graph import forward_part, inference_graph, training_graph
from .graph_tensors import Label

if TYPE_CHECKING:
    from .adapters import AdapterSpec
    from .policy import PrecisionPolicy

_LABEL = ("dtype", "granularity", "scale_format", "layout")


@dataclass(frozen=True)
class EdgeDifference:
    """A tensor that is not the same on both sides; None where a side has no such edge."""

    source: str
    target: str
    tensor: str
    train: Label | None
    rollout: Label | None

    def __str__(self) -> str:
        train, rollout = self.train or "no such edge", self.rollout or "no such edge"
        return f"{self.source} -> {self.target} ({self.tensor}): training {train}, rollout {rollout}"


def differing_edges(train: Any, infer: Any) -> list[EdgeDifference]:
    """Edges of `infer` that the forward part of `train` does not have, or has with another label; and edges
    between two operators that both graphs have, which only `train` has. Sorted by position in the model."""
    forward = forward_part(train)
    found = list(_only_in(infer, forward)) + list(_bypassed(infer, forward))
    order = {name: (row, name) for graph in (forward, infer) for name, row in graph.nodes(data="row")}
    return sorted(found, key=lambda d: (order[d.target], order[d.source], d.tensor))


def compare(
    policy: PrecisionPolicy, model_config: Any, adapter: AdapterSpec | None = None
) -> list[EdgeDifference]:
    """`differing_edges` of the two graphs of a policy; empty exactly if G_infer is a subgraph."""
    sides = (training_graph, inference_graph)
    return differing_edges(*(graph(policy, model_config, adapter=adapter) for graph in sides))


def _only_in(infer: Any, forward: Any) -> Iterator[EdgeDifference]:
    for source, target, tensor, data in infer.edges(keys=True, data=True):
        other = forward.get_edge_data(source, target, tensor)
        if other != data:
            yield EdgeDifference(source, target, tensor, _label(other), _label(data))


def _bypassed(infer: Any, forward: Any) -> Iterator[EdgeDifference]:
    for source, target, tensor, data in forward.edges(keys=True, data=True):
        if source in infer and target in infer and not infer.has_edge(source, target, tensor):
            yield EdgeDifference(source, target, tensor, _label(data), None)


def _label(data: dict[str, Any] | None) -> Label | None:
    return None if data is None else Label(**{key: data[key] for key in _LABEL})
