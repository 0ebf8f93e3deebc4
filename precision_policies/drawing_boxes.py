"""What a drawing shows of a precision graph: operators gathered into boxes, tensors between boxes.

Projections of one input become one box, weights and gradient quantisers become lines of text in the box of their
GEMM. The result is plain data (`Box`, `Arrow`) that `drawing` puts on paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .graph_tensors import Label

_TOGETHER = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "q, k, v_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate, up_proj"),
    **dict.fromkeys(("w1", "w3"), "w1, w3"),
    **dict.fromkeys(("q_norm", "k_norm"), "q, k_norm"),
}
_GEMMS = ("linear", "lm_head", "router", "dgrad", "wgrad")
_HIDDEN = ("grad", "adamw")
_IN_A_GEMM = (".dgrad.quantise", ".wgrad.quantise", ".weight.dequantise")  # seen as operands of the GEMM
_LANES = {"wgrad": "wgrad", "quantise_columns": "wgrad", "dequantise": "wgrad"}


@dataclass
class Box:
    """One box: title, further lines, the format it computes in, where it stands."""

    key: str
    title: str
    row: int
    lane: str  # "forward" | "gradient" | "wgrad"
    op: str
    fill: str
    lines: list[str] = field(default_factory=list)
    weight: list[str] = field(default_factory=list)  # formats that the weight passes through
    members: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Arrow:
    """One or several equal tensors from box to box."""

    source: str
    target: str
    label: Label
    role: str
    tensors: tuple[str, ...]


def boxes_of(graph: Any, phase: str) -> dict[str, Box]:
    """The boxes of the forward or backward operators of `graph`, by key."""
    boxes: dict[str, Box] = {}
    for name, data in graph.nodes(data=True):
        if data["phase"] != phase or data["op"] in _HIDDEN or name.endswith(_IN_A_GEMM):
            continue
        key = box_key(name)
        if key not in boxes:
            lane = "forward" if phase == "forward" else _LANES.get(data["op"], "gradient")
            boxes[key] = Box(key, _title(name, data["op"]), data["row"], lane, data["op"], "")
            _describe(graph, name, boxes[key])
        boxes[key].members.add(name)
    return boxes


def arrows_of(graph: Any, sources: dict[str, Box], targets: dict[str, Box]) -> list[Arrow]:
    """Tensors between boxes; hidden operators are passed through, equal tensors gathered into one arrow."""
    found: dict[tuple[str, str, Label, str], list[str]] = {}
    for source, target, tensor, data in graph.edges(keys=True, data=True):
        if data["role"] == "weight" or source == "optimizer" or target == "optimizer":
            continue
        a = box_key(source)
        for b in _visible(graph, target, targets):
            if data["role"] == "saved" and b in targets and targets[b].lane == "gradient":
                a = b.removesuffix(".backward")  # what an operator keeps is drawn from the operator itself
            if a in sources and b in targets and a != b:
                label = Label(data["dtype"], data["granularity"], data["scale_format"], data["layout"])
                found.setdefault((a, b, label, data["role"]), []).append(tensor)
    return [Arrow(a, b, label, role, tuple(names)) for (a, b, label, role), names in found.items()]


def box_key(name: str) -> str:
    """The key of the box that operator `name` is drawn in."""
    parts = name.split(".")
    return ".".join(_TOGETHER.get(part, part) for part in parts)


def _visible(graph: Any, name: str, boxes: dict[str, Box]) -> set[str]:
    if box_key(name) in boxes:
        return {box_key(name)}
    if graph.nodes[name]["phase"] != "backward" or name == "optimizer":
        return set()
    return {key for after in graph.successors(name) for key in _visible(graph, after, boxes)}


def _title(name: str, op: str) -> str:
    if name.startswith("model.norm"):
        return "d final norm" if op.endswith("_backward") else "final norm"
    parts = [
        p
        for p in box_key(name).split(".")
        if p not in ("model", "layers", "self_attn", "*") and not p.isdigit()
    ]
    if op == "quantise_columns":
        return "quantise 128×1"
    if op == "dequantise":
        return op
    if op == "quantise_activation":
        return "quantise 1×128"
    text = ".".join(parts).replace(".backward", "")
    if op in ("dgrad", "wgrad"):
        return f"{op} of {text.rsplit('.', 1)[0]}"
    return f"d {text}" if op.endswith("_backward") else text


def _describe(graph: Any, name: str, box: Box) -> None:
    """Fill and text from the tensors that enter the operator."""
    entering = list(graph.in_edges(name, data=True))
    operands = [(d["tensor"], _label(d), d["role"]) for _, _, d in entering]
    dtypes = {label.dtype for _, label, role in operands if role != "residual"}
    box.fill = next((d for d in ("e4m3", "fp16", "bf16") if d in dtypes), "fp32" if "fp32" in dtypes else "")
    if name.endswith((".quantise", ".quantise_columns")):
        box.fill = "e4m3"
    if box.op in ("dgrad", "wgrad"):
        box.fill = next(label.dtype for tensor, label, _ in operands if tensor == "dY")
    if name == "token_logprobs.backward":
        box.fill = "fp32"
    if box.op in _GEMMS:
        order = {"dY": 0, "x": 0, "X": 1, "W": 1}
        shown = sorted((order.get(tensor, 2), tensor, str(label)) for tensor, label, _ in operands)
        box.lines.append("  ·  ".join(f"{tensor} {label}" for _, tensor, label in shown))
    held = f"{name}.weight"
    if box.op in ("linear", "lm_head", "router") and held in graph:
        chain = [str(_label(d)) for d in _weight_chain(graph, held)]
        box.weight = [t for i, t in enumerate(chain) if i == 0 or t != chain[i - 1]]


def _weight_chain(graph: Any, held: str) -> list[dict[str, Any]]:
    """Edges from the master weight (if any) to the weight that the GEMM reads."""
    chain: list[dict[str, Any]] = []
    at = held
    while True:
        before = [(source, data) for source, _, data in graph.in_edges(at, data=True)]
        if not before:
            break
        at = before[0][0]
        chain.insert(0, before[0][1])
    return chain or [next(data for _, _, data in graph.out_edges(held, data=True))]


def _label(data: dict[str, Any]) -> Label:
    return Label(data["dtype"], data["granularity"], data["scale_format"], data["layout"])
