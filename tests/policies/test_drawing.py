"""The picture of the precision graph: written without a system program, complete, and honest about differences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from precision_policies import PolicyError, load_policy
from precision_policies.drawing import COLOURS, DIFFERS, draw, figure_of
from tests.policies.models import small

pytest.importorskip("matplotlib")


def texts(figure: Any) -> list[str]:
    """Every text in the picture."""
    return [t.get_text() for t in figure.axes[0].texts]


def boxes(figure: Any) -> list[Any]:
    """The boxes of operators."""
    return [p for p in figure.axes[0].patches if type(p).__name__ == "FancyBboxPatch"]


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_writes_each_picture_type_without_dot(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty PATH (no graphviz `dot`) a non-trivial file of the right kind is written."""
    monkeypatch.setenv("PATH", "")
    path = draw(load_policy("unified-fp8"), small("llama"), tmp_path / f"g.{suffix}")
    content = path.read_bytes()
    assert content[:5] in (b"<?xml", b"\x89PNG\r", b"%PDF-")
    assert len(content) > 10_000


def test_svg_is_searchable_and_reproducible(tmp_path: Path) -> None:
    """Names and formats are text in the SVG, and the same input gives the same bytes."""
    first, second = (
        draw(load_policy("unified-fp8"), small("qwen3"), tmp_path / f"{n}.svg").read_bytes() for n in "ab"
    )
    assert first == second
    text = first.decode()
    for part in (
        "unified-fp8 on qwen3",
        "e4m3 1×128",
        "W fp32 → bf16 → e4m3 128×128",
        "wgrad of o_proj",
        "q, k_norm",
    ):
        assert part in text


def test_fp8_is_seen_at_a_glance() -> None:
    """Under unified-fp8 GEMM boxes have the fp8 fill on both sides; under bf16 no box has."""
    fp8 = COLOURS["e4m3"][1]

    def filled(name: str) -> int:
        from matplotlib.colors import to_hex

        return sum(
            to_hex(b.get_facecolor()) == fp8 for b in boxes(figure_of(load_policy(name), small("llama")))
        )

    # rollout and forward: 4 quantisers and 4 (fused) GEMMs each; backward: 4 quantisers, 4 dgrad, 4 wgrad
    assert filled("unified-fp8") == 8 + 8 + 12
    assert filled("mixed-bf16-fp8") == 8
    assert filled("bf16") == 0


def test_differences_are_marked_and_counted() -> None:
    """mixed has red boxes and says how many tensors differ; unified has none and says on-policy."""
    from matplotlib.colors import to_hex

    mixed = figure_of(load_policy("mixed-bf16-fp8"), small("llama"))
    red = [b for b in boxes(mixed) if to_hex(b.get_edgecolor()) == DIFFERS]
    assert len(red) == 8
    assert any("25 tensors differ" in t for t in texts(mixed))
    unified = figure_of(load_policy("unified-fp8"), small("llama"))
    assert not any(to_hex(b.get_edgecolor()) == DIFFERS for b in boxes(unified))
    assert any("Exactly on-policy" in t for t in texts(unified))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen2_moe"])
def test_no_box_covers_another_and_all_is_inside(family: str) -> None:
    """Boxes do not overlap and lie within the axes, for dense, Gemma-like and MoE layers."""
    figure = figure_of(load_policy("unified-fp8"), small(family))
    axes = figure.axes[0]
    frames = [b.get_extents().transformed(axes.transData.inverted()) for b in boxes(figure)]
    for i, a in enumerate(frames):
        assert axes.get_xlim()[0] < a.x0 < a.x1 < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < a.y0 < a.y1 < axes.get_ylim()[1]
        for b in frames[i + 1 :]:
            assert not a.overlaps(b)


def test_the_layer_shown_is_of_the_most_common_kind() -> None:
    """With two of six layers exempt, layer 1 stands for the four others; --layer shows an exempt one."""
    policy = load_policy({"extends": "unified-fp8", "exempt": {"first_layers": 1, "last_layers": 1}})
    config = small("llama", num_hidden_layers=6)
    assert any(re.search(r"decoder layer 1 \(4 of 6", t) for t in texts(figure_of(policy, config)))
    assert any(re.search(r"decoder layer 0 \(2 of 6", t) for t in texts(figure_of(policy, config, layer=0)))


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    """A .dot or suffixless output is refused by name before anything is drawn."""
    for name in ("g.dot", "g"):
        with pytest.raises(PolicyError, match=r"\.svg"):
            draw(load_policy("bf16"), small("llama"), tmp_path / name)
