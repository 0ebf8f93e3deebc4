"""The backward part of G_train: for each operator its gradient, for each linear dgrad, wgrad and what they quantise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .adapters import B
from .graph_tensors import Label

if TYPE_CHECKING:
    from .graph import GraphBuilder
    from .plan import ModulePlan

_GEMMS = ("linear", "lm_head")
_NO_GRADIENT = ("tokens", "quantise_activation")  # a quantiser passes gradients through unchanged


def add_backward(builder: GraphBuilder) -> None:
    """Append the backward operators to `builder.graph`, mirroring its forward operators row by row."""
    graph = builder.graph
    forward = [n for n, phase in graph.nodes(data="phase") if phase == "forward"]
    inputs = {name: source for name, source, _ in builder.linears}
    rows = {name: row for name, _, row in builder.linears}
    for name in forward:
        op = graph.nodes[name]["op"]
        if op not in (*_GEMMS, *_NO_GRADIENT):
            _mirror(builder, name, f"{op}_backward")
    for name in inputs:
        _gemms(builder, name, rows[name], inputs[name])
    for name in forward:
        if graph.nodes[name]["op"] not in _NO_GRADIENT:
            _incoming(builder, name, inputs)


def _mirror(builder: GraphBuilder, name: str, op: str) -> None:
    """The gradient of an operator that is not a GEMM, with what the forward saved for it."""
    graph, policy = builder.graph, builder.policy
    back = f"{name}.backward"
    _node(builder, back, op, name)
    inputs: dict[str, str] = {"attention": policy.attention.saved, "rms_norm": policy.norm.saved}
    inputs["silu_mul"] = inputs["gelu_mul"] = policy.activation.saved
    if (saved := inputs.get(graph.nodes[name]["op"])) is not None:
        for source, _, data in list(graph.in_edges(name, data=True)):
            if data["role"] == "activation":
                builder.edge(
                    source, back, f"saved {data['tensor']}", builder.labels.activation(saved), "saved"
                )
    own = {"attention": ("output", policy.attention.saved), "add_rms_norm": ("sum", policy.norm.saved)}
    if (made := own.get(graph.nodes[name]["op"])) is not None:
        builder.edge(name, back, f"saved {made[0]}", Label(made[1]), "saved")
    if f"{name}.weight.master" in graph:
        grads = builder.labels.master if graph.nodes[name]["op"] == "embedding" else Label("fp32")
        builder.edge(back, _optimizer(builder), f"d {name}.weight", grads, "gradient")


def _gemms(builder: GraphBuilder, name: str, row: ModulePlan, source: str) -> None:
    labels, dgrad, wgrad = builder.labels, f"{name}.dgrad", f"{name}.wgrad"
    trained = builder.trained(row)
    _node(builder, dgrad, "dgrad", name)
    if trained:
        _node(builder, wgrad, "wgrad", name)
    _node(builder, f"{name}.grad", "grad", name)  # where dY arrives
    for gemm, format, label in (
        (dgrad, row.dgrad, labels.activation(row.dgrad)),
        *([(wgrad, row.wgrad, labels.column(row.wgrad))] if trained else []),
    ):
        feeding = f"{name}.grad"
        if format == "fp8":
            feeding = f"{gemm}.quantise"
            _node(builder, feeding, "quantise_activation" if gemm == dgrad else "quantise_columns", name)
            builder.edge(f"{name}.grad", feeding, "dY", labels.gradient, "gradient")
        builder.edge(feeding, gemm, "dY", label, "gradient")
    _weight_operand(builder, f"{name}.weight", row, dgrad)
    if not trained:
        return
    _saved_input(builder, row, source, wgrad)
    builder.edge(wgrad, _optimizer(builder), f"d {name}.weight", labels.plain("fp32"), "gradient")


def _weight_operand(builder: GraphBuilder, held: str, row: ModulePlan, dgrad: str) -> None:
    """dgrad reads the forward's codes if it is fp8 too, else the forward's weight in its own format."""
    label = builder.labels.weight(row.dgrad)
    if row.train_forward == "fp8" and row.dgrad != "fp8":
        _node(builder, f"{held}.dequantise", "dequantise", dgrad)
        builder.edge(held, f"{held}.dequantise", "W", builder.labels.weight("fp8"), "weight")
        held = f"{held}.dequantise"
    builder.edge(held, dgrad, "W", label, "weight")


def _saved_input(builder: GraphBuilder, row: ModulePlan, source: str, wgrad: str) -> None:
    """What the forward keeps of X, and its way to the weight-gradient GEMM."""
    graph, labels = builder.graph, builder.labels
    quantised = f"{source}.quantise"
    if row.wgrad != "fp8":
        if row.saved == "fp8":
            plain = f"{source}.dequantise"
            if plain not in graph:
                _node(builder, plain, "dequantise", source, below=1)
                builder.edge(quantised, plain, "X", labels.activation("fp8"), "saved")
            builder.edge(plain, wgrad, "X", labels.plain(row.wgrad))
        else:
            builder.edge(source, wgrad, "X", labels.plain(row.saved), "saved")
        return
    columns = f"{source}.quantise_columns"
    if columns not in graph:
        _node(builder, columns, "quantise_columns", source, below=1)
        early = row.saved == "fp8"
        before = labels.compute if early else labels.plain(row.saved)
        builder.edge(source, columns, "X", before, "activation" if early else "saved")
    role = "saved" if row.saved == "fp8" else "activation"
    builder.edge(columns, wgrad, "X", labels.column("fp8"), role)


def _incoming(builder: GraphBuilder, name: str, inputs: dict[str, str]) -> None:
    """Gradient edges against the direction of every forward edge that ends in `name`."""
    graph, labels = builder.graph, builder.labels
    leaving = f"{name}.dgrad" if name in inputs else f"{name}.backward"
    for source, _, tensor, data in list(graph.in_edges(name, keys=True, data=True)):
        if data["role"] not in ("activation", "residual") or graph.nodes[source]["phase"] != "forward":
            continue
        if (
            source in inputs and inputs[source] != name and source.endswith(f".{B}")
        ):  # the product that is added
            builder.edge(
                f"{name}.grad", f"{source}.grad", f"d {tensor} of {name}", labels.gradient, "gradient"
            )
            continue
        origin = inputs.get(name, source)  # past the quantiser, which passes gradients through
        target = f"{origin}.grad" if origin in inputs else f"{origin}.backward"
        if target in graph:
            dtype = labels.plain("fp32") if data["dtype"] == "fp32" else labels.gradient
            builder.edge(leaving, target, f"d {tensor} of {name}", dtype, "gradient")


def _node(builder: GraphBuilder, name: str, op: str, mirrored: str, below: int = 0) -> None:
    at = builder.graph.nodes[mirrored]
    builder.graph.add_node(name, op=op, phase="backward", layer=at["layer"], row=at["row"] + below)


def _optimizer(builder: GraphBuilder) -> str:
    if "optimizer" not in builder.graph:
        builder.graph.add_node("optimizer", op="adamw", phase="backward", layer=None, row=0)
    return "optimizer"
