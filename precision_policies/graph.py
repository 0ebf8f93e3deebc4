"""The precision graph of a model under a policy: nodes are operators, edges are labelled tensors.

G_infer is what the rollout engine computes, G_train what the learner computes, forward and backward. Where G_infer is
a subgraph of the forward part of G_train, both sides apply the same operators to the same tensors (the condition of
Jet-RL, arXiv 2601.14243). Graphs are `networkx.MultiDiGraph`; the key of an edge is the name of its tensor.

Node attributes: op (operator name as in precision_kernels), phase ("forward" | "backward" | "weight"), layer
(int or None), row (position in the order of computation, for drawing). Edge attributes: dtype, granularity,
scale_format, layout, role ("activation" | "weight" | "gradient" | "saved" | "residual").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from . import models
from .adapters import A, B, adapter_formats
from .errors import PolicyError, Violation
from .graph_tensors import Label, Labels
from .plan import ModulePlan, Plan

if TYPE_CHECKING:
    from .adapters import AdapterSpec
    from .policy import PrecisionPolicy

Side = Literal["train", "rollout"]


def training_graph(
    policy: PrecisionPolicy,
    model_config: Any,
    layers: Sequence[int] | None = None,
    adapter: AdapterSpec | None = None,
) -> Any:
    """G_train, forward and backward. `layers` limits it to some decoder layers (all by default).

    adapter: low-rank adapters are trained, and nothing else.
    """
    from .graph_backward import add_backward

    builder = GraphBuilder(policy, model_config, "train", layers, adapter)
    builder.build()
    add_backward(builder)
    return builder.graph


def inference_graph(
    policy: PrecisionPolicy,
    model_config: Any,
    layers: Sequence[int] | None = None,
    adapter: AdapterSpec | None = None,
) -> Any:
    """G_infer. `layers` and `adapter` as in `training_graph`."""
    builder = GraphBuilder(policy, model_config, "rollout", layers, adapter)
    builder.build()
    return builder.graph


def forward_part(graph: Any) -> Any:
    """The subgraph of forward operators and weights."""
    return graph.subgraph([n for n, phase in graph.nodes(data="phase") if phase != "backward"])


class GraphBuilder:
    """Builds the forward part of one side, and remembers what the backward part needs."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        model_config: Any,
        side: Side,
        layers: Sequence[int] | None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        import networkx

        self.policy, self.side, self.config = policy, side, models.config_dict(model_config)
        self.plan: Plan = policy.resolve(self.config, adapter)
        self.labels = Labels(policy)
        count = models.num_layers(self.config)
        self.layers = tuple(range(count) if layers is None else layers)
        wrong = [layer for layer in self.layers if not 0 <= layer < count]
        if wrong:
            problem = f"the model has layers 0 to {count - 1}"
            raise PolicyError("precision graph", [Violation("layers", wrong, problem, "choose from these")])
        self.graph = networkx.MultiDiGraph(side=side, policy=policy.name, fingerprint=policy.fingerprint)
        self.linears: list[tuple[str, str, ModulePlan]] = []  # node, node of its input, plan
        self.row = 0

    def build(self) -> None:
        """Embedding, the chosen decoder layers, final norm, lm_head, log-probs."""
        self.node("tokens", "tokens")
        self.next_row()
        embedding = self.plan["model.embed_tokens"]
        self.node("model.embed_tokens", "embedding")
        self.edge("tokens", "model.embed_tokens", "ids", Label("int64"))
        self.weight("model.embed_tokens", embedding)
        stream, residual = "model.embed_tokens", None
        for layer in self.layers:
            stream, residual = self._layer(layer, stream, residual)
        self._head(self._norm("model.norm", stream, residual, None))

    # ---- pieces; each returns the node whose output goes on -------------------------------------------------

    def _layer(self, layer: int, stream: str, residual: str | None) -> tuple[str, str | None]:
        prefix = f"model.layers.{layer}"
        first = self._norm(f"{prefix}.input_layernorm", stream, residual, layer)
        out = self._attention(f"{prefix}.self_attn", first, layer)
        extra = f"{prefix}.pre_feedforward_layernorm" in self.plan
        if extra:  # Gemma 2 and 3 normalise the output of each block before it is added
            out = self._norm(f"{prefix}.post_attention_layernorm", out, None, layer)
            second = self._norm(f"{prefix}.pre_feedforward_layernorm", out, first, layer)
        else:
            second = self._norm(f"{prefix}.post_attention_layernorm", out, first, layer)
        out = self._feedforward(prefix, second, layer)
        if extra:
            out = self._norm(f"{prefix}.post_feedforward_layernorm", out, None, layer)
        return out, second

    def _norm(self, name: str, source: str, residual: str | None, layer: int | None) -> str:
        """RMSNorm, with the addition of the residual stream (as the norm before it passed it on) if given."""
        self.next_row()
        self.node(name, "add_rms_norm" if residual else "rms_norm", layer)
        self.edge(source, name, "x", self.labels.compute)
        if residual:
            stream = self.labels.plain(self.policy.norm.residual)
            self.edge(residual, name, "residual", stream, "residual")
        self.weight(name, self.plan[name])
        return name

    def _attention(self, prefix: str, source: str, layer: int) -> str:
        projections = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        self._linears(projections, source, layer)
        q, k, v = projections
        if f"{prefix}.q_norm" in self.plan:
            self.next_row()
            for projection, name in ((q, "q_norm"), (k, "k_norm")):
                self.node(f"{prefix}.{name}", "rms_norm", layer)
                self.edge(projection, f"{prefix}.{name}", "x", self.labels.compute)
                self.weight(f"{prefix}.{name}", self.plan[f"{prefix}.{name}"])
            q, k = f"{prefix}.q_norm", f"{prefix}.k_norm"
        self.next_row()
        rotary, attention = f"{prefix}.rotary", f"{prefix}.attention"
        self.node(rotary, "rotary", layer)
        self.edge(q, rotary, "q", self.labels.compute)
        self.edge(k, rotary, "k", self.labels.compute)
        self.next_row()
        self.node(attention, "attention", layer)
        own = getattr(self.policy.attention, self.format_key)
        self.edge(rotary, attention, "q", self.labels.plain(own))
        kept = self.policy.kv_cache.format if self.side == "rollout" else own
        self.edge(rotary, attention, "k", self.labels.plain(kept))
        self.edge(v, attention, "v", self.labels.plain(kept))
        self._linears([f"{prefix}.o_proj"], attention, layer)
        return f"{prefix}.o_proj"

    def _feedforward(self, prefix: str, source: str, layer: int) -> str:
        if f"{prefix}.mlp.down_proj" in self.plan:
            return self._gated_mlp(f"{prefix}.mlp", source, layer)
        block = f"{prefix}.{models.FAMILIES[self.config['model_type']].expert_block}"
        return self._experts(block, source, layer)

    def _gated_mlp(self, prefix: str, source: str, layer: int) -> str:
        gate, up, down = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        self._linears([gate, up], source, layer)
        activation = self._activation(prefix, gate, up, layer)
        self._linears([down], activation, layer)
        return down

    def _activation(self, prefix: str, gate: str, up: str, layer: int) -> str:
        op = models.FAMILIES[self.config["model_type"]].activation
        name = f"{prefix}.{op}"
        self.next_row()
        self.node(name, op, layer)
        self.edge(gate, name, "gate", self.labels.compute)
        self.edge(up, name, "up", self.labels.compute)
        return name

    def _experts(self, block: str, source: str, layer: int) -> str:
        """Router, the experts of the layer as grouped GEMMs (one node per projection), weighted sum."""
        gate, up, down = models.FAMILIES[self.config["model_type"]].expert_names
        first = f"{block}.experts.0"
        router, combine = f"{block}.gate", f"{block}.combine"
        self.next_row()
        self._router(router, source, layer)
        grouped = {f"{block}.experts.*.{name}": self.plan[f"{first}.{name}"] for name in (gate, up, down)}
        names = list(grouped)
        self._linears(names[:2], source, layer, grouped)
        activation = self._activation(f"{block}.experts", names[0], names[1], layer)
        self._linears(names[2:], activation, layer, grouped)
        shared = f"{block}.shared_expert"
        out = None
        if f"{shared}.down_proj" in self.plan:
            out = self._gated_mlp(shared, source, layer)
            self.next_row()
            self._router(f"{shared}_gate", source, layer)
        self.next_row()
        self.node(combine, "combine", layer)
        weights = self.labels.plain("fp32")
        self.edge(names[2], combine, "expert outputs", self.labels.compute)
        self.edge(router, combine, "routing weights", weights)
        if out:
            self.edge(out, combine, "shared output", self.labels.compute)
            self.edge(f"{shared}_gate", combine, "shared gate", weights)
        return combine

    def _router(self, name: str, source: str, layer: int) -> None:
        self.node(name, "router", layer)
        operand = self.labels.plain(getattr(self.plan[name], self.format_key))
        self.edge(source, name, "x", operand)
        self.weight(name, self.plan[name])

    def _head(self, source: str) -> None:
        head = self.plan["lm_head"]
        self.next_row()
        self.node("lm_head", "lm_head")
        self.edge(source, "lm_head", "x", self.labels.plain(getattr(head, self.format_key)))
        self.weight("lm_head", head)
        self.linears.append(("lm_head", source, head))
        self.next_row()
        self.node("token_logprobs", "token_logprobs")
        self.edge("lm_head", "token_logprobs", "logits", self.labels.plain("fp32"))

    def _linears(
        self,
        names: Iterable[str],
        source: str,
        layer: int,
        plans: dict[str, ModulePlan] | None = None,
    ) -> None:
        """Linears of one input: quantised once where their operands are fp8."""
        rows = {name: plans[name] if plans else self.plan[name] for name in names}
        formats = {name: getattr(row, self.format_key) for name, row in rows.items()}
        self.next_row()
        operand = source
        if "fp8" in formats.values():
            operand = f"{source}.quantise"
            if operand not in self.graph:
                self.node(operand, "quantise_activation", layer)
                self.edge(source, operand, "x", self.labels.compute)
        self.next_row()
        for name, row in rows.items():
            self.node(name, "linear", layer)
            fp8 = formats[name] == "fp8"
            self.edge(operand if fp8 else source, name, "x", self.labels.activation(formats[name]))
            self.weight(name, row)
            self.linears.append((name, source, row))
            self._adapter(name, source, layer)

    def _adapter(self, name: str, source: str, layer: int) -> None:
        """The two GEMMs of a linear's adapter, if it has one; the linear's own node adds their product."""
        first, second = f"{name}.{A}", f"{name}.{B}"
        if first not in self.plan:
            return
        formats = adapter_formats(self.policy)
        for node, of in ((first, source), (second, first)):
            row = self.plan[node]
            self.node(node, "linear", layer)
            tensor, label = ("x", row.train_forward) if node == first else ("A x", formats.inner)
            self.edge(of, node, tensor, self.labels.plain(label))
            self.weight(node, row)
            self.linears.append((node, of, row))
        self.edge(second, name, "B A x", self.labels.plain("fp32"))

    # ---- primitives -----------------------------------------------------------------------------------------

    @property
    def format_key(self) -> str:
        """The attribute of a plan's row that holds this side's forward format."""
        return f"{self.side}_forward"

    def trained(self, row: ModulePlan) -> bool:
        """Whether a module has a master weight and a gradient: where there are adapters, only they have."""
        return self.plan.adapter is None or row.kind == "adapter"

    def next_row(self) -> None:
        """Go down one row; every possible quantiser has a row of its own, so that the sides stay aligned."""
        self.row += 1

    def node(self, name: str, op: str, layer: int | None = None, phase: str = "forward") -> None:
        """Add an operator in the current row."""
        self.graph.add_node(name, op=op, phase=phase, layer=layer, row=self.row)

    def edge(self, source: str, target: str, tensor: str, label: Label, role: str = "activation") -> None:
        """Add a tensor from one operator to another."""
        self.graph.add_edge(source, target, key=tensor, tensor=tensor, role=role, **label.attributes())

    def weight(self, module: str, row: ModulePlan) -> None:
        """The weight of `module`: on the training side from its master copy, in the rollout as received."""
        held, layer = f"{module}.weight", self.graph.nodes[module]["layer"]
        format = getattr(row, self.format_key)
        label = self.labels.weight(format)
        self.node(held, "weight", layer, "weight")
        self.edge(held, module, "W", label, "weight")
        if self.side == "train" and self.trained(row):
            master, rounded = f"{held}.master", f"{held}.round"
            self.node(master, "master_weight", layer, "weight")
            self.node(rounded, "round", layer, "weight")
            self.edge(master, rounded, "W32", self.labels.master, "weight")
            if format == "fp8":
                self.node(f"{held}.quantise", "quantise_weight", layer, "weight")
                self.edge(rounded, f"{held}.quantise", "W16", self.labels.compute, "weight")
                rounded = f"{held}.quantise"
            self.edge(rounded, held, "W", label, "weight")
