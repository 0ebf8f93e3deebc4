"""Policy on model: one row per module, exemptions and ragged dimensions with their reasons."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest

from precision_policies import Plan, PolicyError, load_policy
from tests.counting import calls
from tests.policies.models import FAMILIES, LLAMA_8B, MOE_100_LAYERS, QWEN3_8B, small

UNIFIED = load_policy("unified-fp8")


def test_one_sorted_row_per_module_with_formats_of_its_class() -> None:
    """Projections are fp8 in every GEMM under unified-fp8; lm_head, embedding and norms are not."""
    plan = UNIFIED.resolve(QWEN3_8B)
    names = [row.name for row in plan]
    assert names == sorted(names)
    assert len(set(names)) == len(plan) == 36 * 11 + 3
    q = plan["model.layers.7.self_attn.q_proj"]
    assert (q.kind, q.shape, q.padded_shape, q.bias) == ("linear", (4096, 4096), (4096, 4096), False)
    assert (q.train_forward, q.rollout_forward, q.dgrad, q.wgrad, q.saved) == ("fp8",) * 5
    assert q.scale_format == "fp32"
    assert plan["model.layers.0.self_attn.k_proj"].shape == (1024, 4096)
    assert plan["model.layers.0.mlp.down_proj"].shape == (4096, 12288)
    assert plan["model.layers.0.self_attn.q_norm"].shape == (128,)
    for name, kind in (("lm_head", "lm_head"), ("model.embed_tokens", "embedding"), ("model.norm", "norm")):
        assert plan[name].kind == kind
        assert plan[name].train_forward == plan[name].rollout_forward == "bf16"
        assert plan[name].exempt_reason is None


def test_a_missing_module_is_a_key_error_with_the_model() -> None:
    """plan[...] of a wrong name says so, and `in` answers without raising."""
    plan = UNIFIED.resolve(LLAMA_8B)
    with pytest.raises(KeyError, match="q_norm"):
        plan["model.layers.0.self_attn.q_norm"]
    assert "model.layers.0.self_attn.q_norm" not in plan
    assert "model.norm" in plan


@pytest.mark.parametrize(
    ("family", "biased"),
    [
        ("llama", set()),
        ("mistral", set()),
        ("qwen2", {"q_proj", "k_proj", "v_proj"}),
        ("qwen3", set()),
        ("gemma", set()),
        ("qwen2_moe", {"q_proj", "k_proj", "v_proj"}),
    ],
)
def test_biases_are_where_the_architecture_has_them(family: str, biased: set[str]) -> None:
    """Qwen2 has biases on q, k and v only."""
    plan = UNIFIED.resolve(small(family))
    assert {row.name.rsplit(".", 1)[-1] for row in plan if row.bias} == biased


def test_configured_biases_are_seen() -> None:
    """Llama's attention_bias and mlp_bias put biases on all projections of the block."""
    plan = UNIFIED.resolve(small("llama", attention_bias=True, mlp_bias=True))
    assert {row.name.rsplit(".", 1)[-1] for row in plan if row.bias} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_tied_models_say_what_lm_head_is_tied_to() -> None:
    """Gemma ties by default, Qwen3 by its config; the row of lm_head names the embedding."""
    assert UNIFIED.resolve(small("gemma3_text"))["lm_head"].tied_to == "model.embed_tokens"
    assert UNIFIED.resolve(small("gemma", tie_word_embeddings=False))["lm_head"].tied_to is None
    assert (
        UNIFIED.resolve(small("qwen3", tie_word_embeddings=True))["lm_head"].tied_to == "model.embed_tokens"
    )
    assert UNIFIED.resolve(small("qwen3"))["lm_head"].tied_to is None


def test_a_tied_head_cannot_have_another_format_than_the_table() -> None:
    """lm_head in fp32 on a tied model is refused for both sides in one message; untied it is fine."""
    policy = load_policy(
        {"extends": "unified-fp8", "lm_head": {"train_forward": "fp32", "rollout_forward": "fp32"}}
    )
    assert policy.resolve(small("qwen3"))["lm_head"].rollout_forward == "fp32"
    with pytest.raises(PolicyError, match="ties lm_head") as caught:
        policy.resolve(small("qwen3", tie_word_embeddings=True))
    assert {v.key for v in caught.value.violations} == {"lm_head.train_forward", "lm_head.rollout_forward"}


def test_experts_and_routers_have_rows() -> None:
    """An MoE layer has a router and three rows per expert; dense layers of the model stay dense."""
    plan = UNIFIED.resolve(small("qwen3_moe", mlp_only_layers=[0]))
    kinds = Counter(row.kind for row in plan)
    assert kinds["expert"] == 4 * 3
    assert kinds["router"] == 1
    expert = plan["model.layers.1.mlp.experts.3.down_proj"]
    assert (expert.shape, expert.train_forward) == ((256, 128), "fp8")
    assert plan["model.layers.1.mlp.gate"].train_forward == "fp32"
    assert plan["model.layers.0.mlp.gate_proj"].kind == "linear"
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in UNIFIED.resolve(small("mixtral"))
    shared = UNIFIED.resolve(small("qwen2_moe"))
    assert shared["model.layers.0.mlp.shared_expert.up_proj"].shape == (256, 256)
    assert shared["model.layers.0.mlp.shared_expert_gate"].kind == "router"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_resolves_under_every_kind_of_policy(family: str) -> None:
    """Each supported architecture has a plan under bf16, mixed and unified, with equal names."""
    plans = [load_policy(name).resolve(small(family)) for name in ("bf16", "mixed-bf16-fp8", "unified-fp8")]
    assert plans[0].modules != plans[1].modules != plans[2].modules
    assert len({tuple(row.name for row in plan) for plan in plans}) == 1
    assert not any(row.uses_fp8 for row in plans[0])
    assert all(row.train_forward != "fp8" for row in plans[1])


# ---- ragged dimensions --------------------------------------------------------------------------------------


def test_pad_rounds_each_dimension_up_to_the_block() -> None:
    """Dimensions 4304 and 192 become 4352 and 256 where the GEMM is fp8, and stay where it is not."""
    config = small(
        "llama", intermediate_size=4304, num_key_value_heads=1, num_attention_heads=4, head_dim=192
    )
    plan = UNIFIED.resolve(config)
    assert plan["model.layers.0.mlp.gate_proj"].padded_shape == (4352, 256)
    assert plan["model.layers.0.self_attn.k_proj"].padded_shape == (256, 256)
    assert plan["lm_head"].padded_shape == plan["lm_head"].shape
    bf16 = load_policy("bf16").resolve(config)["model.layers.0.mlp.gate_proj"]
    assert bf16.padded_shape == bf16.shape


def test_exempt_takes_whole_fused_groups_out_with_the_reason() -> None:
    """A ragged k_proj takes q and v with it, as engines compute them as one GEMM; others stay fp8."""
    policy = load_policy({"extends": "unified-fp8", "ragged": "exempt"})
    plan = policy.resolve(small("llama", num_key_value_heads=1))
    k, q, o = (plan[f"model.layers.0.self_attn.{n}_proj"] for n in "kqo")
    assert k.exempt_reason == "ragged: exempt, (64, 256) is not a multiple of 128"
    assert q.exempt_reason == "ragged: exempt, computed in one GEMM with model.layers.0.self_attn.k_proj"
    assert (q.train_forward, q.rollout_forward, q.dgrad, q.saved) == ("bf16",) * 4
    assert o.exempt_reason is None
    assert o.train_forward == "fp8"
    assert len(plan.exempt) == 2 * 3


def test_refuse_lists_every_ragged_shape() -> None:
    """ragged: refuse names each shape with its count and a module, and what else can be done."""
    policy = load_policy({"extends": "unified-fp8", "ragged": "refuse"})
    with pytest.raises(PolicyError) as caught:
        policy.resolve(small("llama", intermediate_size=500, num_key_value_heads=1))
    text = str(caught.value)
    assert "4 modules of shape (64, 256)" in text
    assert "4 modules of shape (500, 256)" in text
    assert "2 modules of shape (256, 500)" in text
    assert "ragged: pad" in text
    assert policy.resolve(small("llama")).exempt == ()


# ---- exemptions ---------------------------------------------------------------------------------------------


def exempting(**exempt: Any) -> Any:
    """unified-fp8 with exemptions."""
    return load_policy({"extends": "unified-fp8", "exempt": exempt})


def test_patterns_become_names_on_both_sides() -> None:
    """An exempt module is bf16 in training, rollout and backward, with the pattern as reason."""
    plan = exempting(modules=["model.layers.0.**", "**.down_proj"]).resolve(small("llama"))
    assert set(plan.exempt) == {
        *(f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"),
        *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")),
        "model.layers.1.mlp.down_proj",
    }
    row = plan["model.layers.1.mlp.down_proj"]
    assert row.exempt_reason == "exempt.modules: '**.down_proj'"
    assert (row.train_forward, row.rollout_forward, row.wgrad, row.saved) == ("bf16",) * 4


def test_mlp_gate_never_catches_gate_proj() -> None:
    """**.mlp.gate matches no linear of a dense model and is refused; it is not a prefix of gate_proj."""
    with pytest.raises(PolicyError, match="matches no linear module"):
        exempting(modules=["**.mlp.gate"]).resolve(small("qwen3"))


def test_a_pattern_that_matches_nothing_is_refused_with_a_hint() -> None:
    """A bare name gets the hint to write '**.'; a misspelt one gets the nearest name."""
    with pytest.raises(PolicyError) as caught:
        exempting(modules=["o_proj", "**.donw_proj"]).resolve(small("qwen3"))
    assert "did you mean '**.o_proj'?" in str(caught.value)
    assert "did you mean 'down_proj'?" in str(caught.value)


def test_part_of_a_fused_group_is_refused() -> None:
    """Exempting k_proj alone cannot work in an engine that computes qkv at once; the rest of the group is named."""
    with pytest.raises(PolicyError, match=r"exempts 1 of 3 .*qkv_proj.*\n?.*exempt q_proj, v_proj too"):
        exempting(modules=["model.layers.0.self_attn.k_proj"]).resolve(small("llama"))
    with pytest.raises(PolicyError, match=r"experts\.gate_up_proj"):
        exempting(modules=["**.experts.0.gate_proj"]).resolve(small("qwen3_moe"))
    assert len(exempting(modules=["**.experts.**"]).resolve(small("qwen3_moe")).exempt) == 2 * 4 * 3


def test_first_and_last_layers_count_from_the_ends() -> None:
    """first_layers: 1 and last_layers: 2 of five leave layers 1 and 2 in fp8."""
    plan = exempting(first_layers=1, last_layers=2).resolve(small("llama", num_hidden_layers=5))
    assert {row.name.split(".")[2] for row in plan if row.uses_fp8} == {"1", "2"}
    assert plan["model.layers.0.mlp.up_proj"].exempt_reason == "exempt.first_layers: 1"
    assert plan["model.layers.4.mlp.up_proj"].exempt_reason == "exempt.last_layers: 2"


# ---- the plan as a value ------------------------------------------------------------------------------------


def test_plan_round_trip_and_tampering() -> None:
    """A plan survives JSON and pickle; one changed format in the JSON is noticed by its hash."""
    plan = exempting(first_layers=1).resolve(small("qwen2_moe"))
    data = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(data) == plan == pickle.loads(pickle.dumps(plan))
    data["modules"][0][4] = "fp8"
    with pytest.raises(PolicyError, match="was changed"):
        Plan.from_dict(data)
    with pytest.raises(PolicyError, match="not a plan"):
        Plan.from_dict({"columns": 3})


def test_the_hash_is_of_the_rows_only() -> None:
    """Guard settings leave the plan hash alone; a format, a shape or a bias changes it."""
    base = UNIFIED.resolve(small("qwen3")).hash
    assert (
        load_policy({"extends": "unified-fp8", "guard": {"patience": 5}}).resolve(small("qwen3")).hash == base
    )
    others = [
        load_policy("mixed-bf16-fp8").resolve(small("qwen3")),
        load_policy("unified-fp8-ue8m0").resolve(small("qwen3")),
        UNIFIED.resolve(small("qwen3", vocab_size=513)),
        UNIFIED.resolve(small("qwen3", attention_bias=True)),
        UNIFIED.resolve(small("qwen3", tie_word_embeddings=True)),
    ]
    assert len({base, *(plan.hash for plan in others)}) == 6


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "model_type"),
        ({"model_type": "gpt2"}, "not known"),
        ({"model_type": "qwen4"}, "did you mean 'qwen"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "text_config"),
        ({"model_type": "llama"}, "hidden_size"),
        (small("llama", hidden_size="256"), "positive whole number"),
        (small("llama", num_key_value_heads=3), "divide"),
        (small("llama", num_key_value_heads=0), "num_key_value_heads"),
        (small("llama", head_dim=-64), "head_dim"),
        (small("qwen3_moe", num_experts=None, num_local_experts=None), "num_experts"),
        ([], "mapping"),
        (None, "mapping"),
    ],
)
def test_configs_that_do_not_say_enough_are_refused(config: Any, why: str) -> None:
    """Unknown architectures and missing sizes raise PolicyError and say which."""
    with pytest.raises(PolicyError, match=why):
        UNIFIED.resolve(config)


@pytest.mark.parametrize(
    ("config", "modules"), [(QWEN3_8B, 399), (MOE_100_LAYERS, 39_303)], ids=["36", "moe100"]
)
def test_large_models_resolve(config: dict[str, Any], modules: int) -> None:
    """A 36-layer model and a 100-layer model of 128 experts have as many modules as their configs say."""
    plan = exempting(first_layers=1).resolve(config)
    assert len(plan.hash) == 64
    assert len(plan) == modules


@pytest.mark.parametrize("config", [QWEN3_8B, MOE_100_LAYERS], ids=["dense", "moe"])
def test_the_work_of_resolving_is_linear_in_the_layers(config: dict[str, Any]) -> None:
    """Four more layers take the function calls that the four before took, hash included; 50 per module are enough."""
    policy, plans = exempting(first_layers=1), {}

    def resolve(layers: int) -> None:
        plans[layers] = policy.resolve({**config, "num_hidden_layers": layers})
        assert plans[layers].hash

    resolve(2)  # what is made once
    four, eight, twelve = (calls(lambda n=n: resolve(n)) for n in (4, 8, 12))
    assert twelve - eight <= 1.02 * (eight - four)
    assert twelve <= 50 * len(plans[12])
