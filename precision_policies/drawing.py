"""Draws the precision graph: rollout, training forward and training backward side by side, coloured by format.

Needs matplotlib, which is imported here only. One decoder layer stands for all that are like it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import models
from .drawing_boxes import Arrow, Box, arrows_of, boxes_of
from .errors import PolicyError, Violation
from .graph import inference_graph, training_graph
from .graph_compare import differing_edges

if TYPE_CHECKING:
    from .plan import Plan
    from .policy import PrecisionPolicy

FORMATS = ("svg", "png", "pdf")
COLOURS = {  # format -> line, fill; e4m3 is also drawn thicker, so that it does not hang on colour alone
    "e4m3": ("#d9480f", "#ffd8a8"),
    "bf16": ("#1864ab", "#d0ebff"),
    "fp16": ("#2b8a3e", "#d3f9d8"),
    "fp32": ("#495057", "#e9ecef"),
    "": ("#868e96", "#ffffff"),
    "int64": ("#868e96", "#ffffff"),
}
DIFFERS = "#c2255c"
_X = {"rollout": 2.0, "forward": 7.4, "wgrad": 12.9, "gradient": 17.4}
_HALF = 1.95  # half the width of a box
_ROW = 1.5  # distance of rows
_LINE = 0.25  # distance of lines of text in a box
_HEIGHT = {0: 0.5, 1: 0.74, 2: 0.98}  # height of a box by its number of further lines


def draw(
    policy: PrecisionPolicy, model_config: Any, path: str | os.PathLike[str], layer: int | None = None
) -> Path:
    """Write the picture to `path` (.svg, .png or .pdf) and return it.

    layer: which decoder layer to show; by default the first of the most common kind. Raises PolicyError for another
    file type, or if matplotlib is missing.
    """
    path = Path(path)
    if path.suffix.lstrip(".") not in FORMATS:
        violation = Violation(
            "output", str(path), "is not a picture type", f"end it in .{', .'.join(FORMATS)}"
        )
        raise PolicyError("precision graph", [violation])
    figure = figure_of(policy, model_config, layer)
    import matplotlib

    # text stays text (searchable, small), and equal input gives equal bytes
    settings = {"svg.fonttype": "none", "svg.hashsalt": "precision", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
        figure.savefig(path, bbox_inches="tight", dpi=130, metadata=stamp)
    return path


def figure_of(policy: PrecisionPolicy, model_config: Any, layer: int | None = None) -> Any:
    """The picture as a matplotlib Figure (no window, no pyplot state)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        violation = Violation("matplotlib", str(error), "is needed for drawing", "pip install matplotlib")
        raise PolicyError("precision graph", [violation]) from error
    plan = policy.resolve(model_config)
    kinds = _layer_kinds(plan, models.num_layers(model_config))
    if layer is None:
        common = Counter(kinds).most_common(1)[0][0]
        layer = kinds.index(common)
    train = training_graph(policy, model_config, (layer,))
    infer = inference_graph(policy, model_config, (layer,))
    canvas = _Canvas(train, infer, {(d.source, d.target) for d in differing_edges(train, infer)})
    figure = Figure(figsize=(17.5, 0.74 * canvas.rows + 2.4))
    axes = figure.add_axes((0, 0, 1, 1))
    canvas.paint(axes)
    _headings(axes, canvas, policy, plan, layer, kinds)
    return figure


def _layer_kinds(plan: Plan, count: int) -> list[tuple[Any, ...]]:
    """For each layer the formats of its modules; equal entries are layers that look alike."""
    kinds: list[list[Any]] = [[] for _ in range(count)]
    for row in plan:
        parts = row.name.split(".")
        if parts[:2] == ["model", "layers"]:
            formats = (row.train_forward, row.rollout_forward, row.dgrad, row.wgrad, row.saved)
            kinds[int(parts[2])].append((".".join(parts[3:]), formats))
    return [tuple(kind) for kind in kinds]


class _Canvas:
    """Places boxes in lanes and rows and paints them."""

    def __init__(self, train: Any, infer: Any, differing: set[tuple[str, str]]) -> None:
        self.differing = differing
        self.panels = {
            "rollout": boxes_of(infer, "forward"),
            "forward": boxes_of(train, "forward"),
            "backward": boxes_of(train, "backward"),
        }
        self.arrows = {
            "rollout": arrows_of(infer, self.panels["rollout"], self.panels["rollout"]),
            "forward": arrows_of(train, self.panels["forward"], self.panels["forward"]),
            "saved": arrows_of(train, self.panels["forward"], self.panels["backward"]),
            "backward": arrows_of(train, self.panels["backward"], self.panels["backward"]),
        }
        used = sorted({box.row for panel in self.panels.values() for box in panel.values()})
        self.position = {row: index for index, row in enumerate(used)}
        self.rows = len(used)

    def paint(self, axes: Any) -> None:
        """Everything but the headings."""
        axes.set_xlim(-1.4, 20.7)
        axes.set_ylim(-_ROW * self.rows - 0.6, 3.4)
        axes.axis("off")
        for panel in ("rollout", "forward", "backward"):
            for arrow in self.arrows[panel]:
                self._arrow(axes, arrow, self.panels[panel], self.panels[panel], panel)
        for arrow in self.arrows["saved"]:
            self._saved(axes, arrow)
        for panel, boxes in self.panels.items():
            for box in boxes.values():
                self._box(axes, box, panel)

    def _at(self, box: Box, panel: str) -> tuple[float, float]:
        lane = box.lane if panel == "backward" else panel
        return _X[lane], -_ROW * self.position[box.row]

    def _box(self, axes: Any, box: Box, panel: str) -> None:
        from matplotlib.patches import FancyBboxPatch

        x, y = self._at(box, panel)
        lines = self._lines(box, panel)
        height, (line, fill) = _HEIGHT[len(lines)], COLOURS[box.fill]
        wrong = panel == "rollout" and any(target in box.members for _, target in self.differing)
        style: dict[str, Any] = {
            "edgecolor": DIFFERS if wrong else line,
            "linewidth": 2.2 if wrong else 1.2,
            "facecolor": fill,
        }
        corner = (x - _HALF, y - height / 2)
        axes.add_patch(
            FancyBboxPatch(corner, 2 * _HALF, height, boxstyle="round,pad=0.02,rounding_size=0.1", **style)
        )
        offset = _LINE * len(lines) / 2
        axes.text(x, y + offset, box.title, ha="center", va="center", fontsize=9, weight="bold", zorder=5)
        for index, text in enumerate(lines):
            axes.text(
                x, y + offset - _LINE * (index + 1), text, ha="center", va="center", fontsize=7, zorder=5
            )

    def _arrow(
        self, axes: Any, arrow: Arrow, sources: dict[str, Box], targets: dict[str, Box], panel: str
    ) -> None:
        a, b = sources[arrow.source], targets[arrow.target]
        (x1, y1), (x2, y2) = self._at(a, panel), self._at(b, panel)
        if x1 != x2:  # between lanes of the backward panel
            edge = _HALF if x2 > x1 else -_HALF
            self._line(axes, arrow, (x1 + edge, y1), (x2 - edge, y2), 0.0)
            return
        sign = 1 if y2 < y1 else -1
        if self._blocked(panel, a, b):  # past other boxes, along the outer side
            side = 1 if panel == "backward" else -1
            bend = min(0.16, 3.8 / abs(y1 - y2))  # a long way round must not leave the picture
            self._line(axes, arrow, (x1 + side * _HALF, y1), (x2 + side * _HALF, y2), -bend * side * sign)
            return
        start, end = y1 - sign * self._half(a, panel), y2 + sign * self._half(b, panel)
        self._line(axes, arrow, (x1, start), (x2, end), 0.0)
        text = "ids" if arrow.label.dtype == "int64" else str(arrow.label)
        self._text(axes, arrow, text, x1 + 0.12, (start + end) / 2)

    def _blocked(self, panel: str, a: Box, b: Box) -> bool:
        low, high = sorted((a.row, b.row))
        return any(low < box.row < high and box.lane == a.lane for box in self.panels[panel].values())

    def _half(self, box: Box, panel: str) -> float:
        return _HEIGHT[len(self._lines(box, panel))] / 2 + 0.03

    def _lines(self, box: Box, panel: str) -> list[str]:
        if not box.weight:
            return box.lines
        made = f"W {' → '.join(box.weight)}" if panel == "forward" else "W as received"
        return [*box.lines, made]

    def _saved(self, axes: Any, arrow: Arrow) -> None:
        a, b = self.panels["forward"][arrow.source], self.panels["backward"][arrow.target]
        (x1, y1), (x2, y2) = self._at(a, "forward"), self._at(b, "backward")
        self._line(axes, arrow, (x1 + _HALF, y1), (x2 - _HALF, y2), 0.0)
        if b.lane == "wgrad":
            self._text(
                axes,
                arrow,
                str(arrow.label),
                (x1 + x2) / 2 + (0.1 if y1 != y2 else -0.62),
                (y1 + y2) / 2 + 0.15,
            )
        else:
            self._text(axes, arrow, str(arrow.label), x1 + _HALF + 0.35, y1 + 0.17)

    def _line(
        self, axes: Any, arrow: Arrow, start: tuple[float, float], end: tuple[float, float], bend: float
    ) -> None:
        from matplotlib.patches import FancyArrowPatch

        colour = COLOURS[arrow.label.dtype][0]
        width = 2.6 if arrow.label.dtype == "e4m3" else 1.3
        dashes = {"saved": "--", "residual": ":"}.get(arrow.role, "-")
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=11,
                color=colour,
                linewidth=width,
                linestyle=dashes,
                connectionstyle=f"arc3,rad={bend}",
                shrinkA=0,
                shrinkB=0,
                zorder=1,
            )
        )

    def _text(self, axes: Any, arrow: Arrow, text: str, x: float, y: float) -> None:
        colour = COLOURS[arrow.label.dtype][0]
        axes.text(x, y, text, fontsize=7, color=colour, va="center", ha="left", zorder=4)


def _headings(
    axes: Any, canvas: _Canvas, policy: PrecisionPolicy, plan: Plan, layer: int, kinds: list[tuple[Any, ...]]
) -> None:
    alike = kinds.count(kinds[layer])
    model = f"{plan.model_type}, decoder layer {layer} ({alike} of {len(kinds)} layers look like it)"
    axes.text(-1.2, 3.1, f"{policy.name} on {model}", fontsize=14, weight="bold", va="center")
    count = len(canvas.differing)
    if count:
        verdict = f"The rollout is not part of the training forward: {count} tensors differ (red boxes)."
    else:
        verdict = "Every operator and tensor of the rollout is in the training forward."
    policy_says = (
        "Exactly on-policy."
        if policy.exactly_on_policy
        else "Off-policy: " + "; ".join(policy.off_policy_reasons)
    )
    colour = DIFFERS if count else "#2b8a3e"
    axes.text(-1.2, 2.6, f"{verdict} {policy_says}", fontsize=10.5, color=colour, va="center")
    heads = {
        "rollout": "Rollout (G_infer)",
        "forward": "Training, forward",
        "wgrad": "Training, weight gradients",
        "gradient": "Training, gradients (upwards)",
    }
    for lane, text in heads.items():
        axes.text(_X[lane], 0.85, text, fontsize=11, weight="bold", ha="center", va="center")
    _legend(axes)


def _legend(axes: Any) -> None:
    from matplotlib.lines import Line2D

    names = {"e4m3": "fp8 (e4m3 codes, block scales)", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    handles = [
        Line2D([], [], color=COLOURS[key][0], linewidth=3.2 if key == "e4m3" else 1.6, label=text)
        for key, text in names.items()
    ]
    handles.append(Line2D([], [], color="#495057", linestyle="--", label="saved for backward"))
    handles.append(Line2D([], [], color="#495057", linestyle=":", label="residual stream"))
    where = {"loc": "center left", "bbox_to_anchor": (-1.35, 1.75), "bbox_transform": axes.transData}
    axes.legend(handles=handles, ncol=6, frameon=False, fontsize=9, **where)
