"""The precision graph: what flows where, and whether the rollout is part of the training forward."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import networkx
import pytest

from precision_policies import PolicyError, available, load_policy
from precision_policies.graph import forward_part, inference_graph, training_graph
from precision_policies.graph_compare import compare, differing_edges
from tests.counting import calls
from tests.policies.models import FAMILIES, QWEN3_8B, small

UNIFIED = load_policy("unified-fp8")
L = "model.layers.0"


def operators(graph: Any) -> dict[str, dict[str, Any]]:
    """Name -> attributes of every operator."""
    return dict(graph.nodes(data=True))


def edge(graph: Any, source: str, target: str, tensor: str) -> tuple[str, str, str]:
    """dtype, granularity and role of a tensor."""
    data = graph.edges[source, target, tensor]
    return data["dtype"], data["granularity"], data["role"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(available()))
def test_rollout_is_a_subgraph_exactly_where_formats_agree(name: str, family: str) -> None:
    """For every shipped policy and architecture: subgraph, no differing edge, and on-policy formats agree."""
    policy = load_policy(name)
    train, infer = training_graph(policy, small(family)), inference_graph(policy, small(family))
    same = name != "mixed-bf16-fp8"
    assert (differing_edges(train, infer) == []) is same
    assert not same or operators(infer).items() <= operators(forward_part(train)).items()
    for graph in (train, infer):
        assert networkx.is_directed_acyclic_graph(graph)
        for _, _, data in graph.edges(data=True):
            assert {"dtype", "granularity", "scale_format", "layout", "role", "tensor"} <= data.keys()
            assert (data["dtype"] == "e4m3") == bool(data["granularity"]) == bool(data["scale_format"])


def test_forward_tensors_of_unified_fp8() -> None:
    """Norm output bf16 into one quantiser, e4m3 1x128 into q, k and v; fp32 -> bf16 -> e4m3 weights; fp32 logits."""
    g = training_graph(UNIFIED, small("qwen3"))
    norm, q = f"{L}.input_layernorm", f"{L}.self_attn.q_proj"
    assert edge(g, norm, f"{norm}.quantise", "x") == ("bf16", "", "activation")
    for name in ("q_proj", "k_proj", "v_proj"):
        assert edge(g, f"{norm}.quantise", f"{L}.self_attn.{name}", "x") == ("e4m3", "1x128", "activation")
    assert edge(g, f"{q}.weight.master", f"{q}.weight.round", "W32") == ("fp32", "", "weight")
    assert edge(g, f"{q}.weight.round", f"{q}.weight.quantise", "W16") == ("bf16", "", "weight")
    assert edge(g, f"{q}.weight.quantise", f"{q}.weight", "W") == ("e4m3", "128x128", "weight")
    assert edge(g, f"{q}.weight", q, "W") == ("e4m3", "128x128", "weight")
    assert edge(g, "model.norm", "lm_head", "x") == ("bf16", "", "activation")
    assert edge(g, "lm_head", "token_logprobs", "logits") == ("fp32", "", "activation")
    residual = edge(g, f"{L}.input_layernorm", f"{L}.post_attention_layernorm", "residual")
    assert residual == ("bf16", "", "residual")


def test_backward_tensors_of_unified_fp8() -> None:
    """dgrad multiplies 1x128 gradients by the forward's codes, wgrad 128x1 by saved 128x1; gradients are bf16."""
    g = training_graph(UNIFIED, small("qwen3"))
    down, act = f"{L}.mlp.down_proj", f"{L}.mlp.silu_mul"
    assert edge(g, f"{down}.grad", f"{down}.dgrad.quantise", "dY") == ("bf16", "", "gradient")
    assert edge(g, f"{down}.dgrad.quantise", f"{down}.dgrad", "dY") == ("e4m3", "1x128", "gradient")
    assert edge(g, f"{down}.weight", f"{down}.dgrad", "W") == ("e4m3", "128x128", "weight")
    assert edge(g, f"{down}.wgrad.quantise", f"{down}.wgrad", "dY") == ("e4m3", "128x1", "gradient")
    assert edge(g, f"{act}.quantise_columns", f"{down}.wgrad", "X") == ("e4m3", "128x1", "saved")
    assert g.edges[f"{act}.quantise_columns", f"{down}.wgrad", "X"]["layout"] == "columns"
    assert edge(g, f"{down}.wgrad", "optimizer", f"d {down}.weight") == ("fp32", "", "gradient")
    assert edge(g, f"{down}.dgrad", f"{act}.backward", f"d x of {down}")[0] == "bf16"


def test_backward_in_fp16_dequantises_what_the_forward_saved() -> None:
    """unified-fp8-fp16-backward saves 1x128 codes, and both backward GEMMs see fp16 operands only."""
    g = training_graph(load_policy("unified-fp8-fp16-backward"), small("llama"))
    down, act = f"{L}.mlp.down_proj", f"{L}.mlp.silu_mul"
    assert edge(g, f"{act}.quantise", f"{act}.dequantise", "X") == ("e4m3", "1x128", "saved")
    assert edge(g, f"{act}.dequantise", f"{down}.wgrad", "X")[:2] == ("fp16", "")
    assert edge(g, f"{down}.weight.dequantise", f"{down}.dgrad", "W")[:2] == ("fp16", "")
    for gemm in ("dgrad", "wgrad"):
        assert {d["dtype"] for _, _, d in g.in_edges(f"{down}.{gemm}", data=True)} == {"fp16"}


def test_every_trained_weight_gets_a_gradient() -> None:
    """For each module of the plan a path leads from the log-probs' gradient to the optimizer."""
    config = small("gemma2")
    g = training_graph(UNIFIED, config)
    arriving = {key for _, _, key in g.in_edges("optimizer", keys=True)}
    assert arriving == {f"d {row.name}.weight" for row in UNIFIED.resolve(config)}
    assert all(
        networkx.has_path(g, "token_logprobs.backward", source) for source, _ in g.in_edges("optimizer")
    )


def test_mixed_reports_every_differing_edge() -> None:
    """Per layer: 4 quantiser inputs, 7 x and 7 W in fp8, 7 x that only training has; nothing outside projections."""
    policy = load_policy("mixed-bf16-fp8")
    found = compare(policy, small("llama"))
    assert len(found) == 2 * (4 + 7 + 7 + 7)
    weight = next(d for d in found if d.tensor == "W" and d.target == f"{L}.mlp.up_proj")
    assert (str(weight.train), str(weight.rollout)) == ("bf16", "e4m3 128×128")
    assert "training bf16, rollout e4m3 128×128" in str(weight)
    bypass = next(d for d in found if d.source == f"{L}.mlp.silu_mul" and d.target == f"{L}.mlp.down_proj")
    assert (str(bypass.train), bypass.rollout) == ("bf16", None)
    assert not any("norm" in d.target and "quantise" not in d.target for d in found)


@pytest.mark.parametrize("attribute", ["dtype", "granularity", "scale_format", "layout"])
def test_one_changed_label_is_found(attribute: str) -> None:
    """The subgraph check looks at every part of a label: planting one difference gives exactly one report."""
    train, infer = training_graph(UNIFIED, small("llama")), inference_graph(UNIFIED, small("llama"))
    source, target = f"{L}.mlp.silu_mul.quantise", f"{L}.mlp.down_proj"
    infer.edges[source, target, "x"][attribute] = "planted"
    [found] = differing_edges(train, infer)
    assert (found.source, found.target, found.tensor) == (source, target, "x")


def test_exempt_layers_flow_in_bf16() -> None:
    """An exempt first layer has no quantiser on either side and is still a subgraph."""
    policy = load_policy({"extends": "unified-fp8", "exempt": {"first_layers": 1}})
    train, infer = training_graph(policy, small("llama")), inference_graph(policy, small("llama"))
    assert differing_edges(train, infer) == []
    quantised = {
        layer for _, d in train.nodes(data=True) if d["op"].startswith("quantise") for layer in [d["layer"]]
    }
    assert quantised == {1}


def test_limits_and_sizes() -> None:
    """Layers can be chosen; a layer that does not exist is refused; the backward is not in the forward part."""
    g = training_graph(UNIFIED, QWEN3_8B, (3,))
    assert {d["layer"] for _, d in g.nodes(data=True)} == {None, 3}
    assert all(d["phase"] != "backward" for _, d in forward_part(g).nodes(data=True))
    with pytest.raises(PolicyError, match="layers 0 to 35"):
        training_graph(UNIFIED, QWEN3_8B, (36,))


def test_the_work_of_a_comparison_is_linear_in_the_layers() -> None:
    """Both graphs of 36 layers are equal; three more layers take the function calls that the three before took."""
    assert compare(UNIFIED, QWEN3_8B) == []
    three, six, nine = (
        calls(lambda n=n: compare(UNIFIED, {**QWEN3_8B, "num_hidden_layers": n})) for n in (3, 6, 9)
    )
    assert nine - six <= 1.02 * (six - three)


def test_graphs_are_equal_in_another_process() -> None:
    """Node and edge order does not hang on hash randomisation, so exported graphs can be compared as text."""
    program = (
        "import json, sys; from precision_policies import load_policy; from precision_policies.graph import *\n"
        "g = training_graph(load_policy('unified-fp8'), json.loads(sys.stdin.read()))\n"
        "print(json.dumps([list(g.nodes(data=True)), list(g.edges(keys=True, data=True))]))"
    )
    config = json.dumps(small("qwen2_moe"))
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            input=config,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 10_000
