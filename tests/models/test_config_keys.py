"""Every key of a config.json is computed as transformers computes it, or refused by name; left-out keys take its
defaults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from precision_policies.models import BUILT, FAMILIES, kv_heads
from rllib_llm.models import PackedBatch
from rllib_llm.models.architecture import Architecture, ArchitectureError
from rllib_llm.models.checkpoint import load_pretrained
from tests.models.cases import fp32_policy, random_sequences

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 120, "num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0, "eos_token_id": 2,
    "sliding_window": None,
}  # fmt: skip
# Other values of every field of the config classes, and of further keys that transformers, vLLM or a model's own code
# obeys. A value may be computed, or refused; it may not be passed over.
OTHERS: dict[str, list[Any]] = {
    "transformers_version": ["4.40.0"], "architectures": [["Other"], ["LlamaForSequenceClassification"], []],
    "output_hidden_states": [True], "return_dict": [False], "dtype": ["float16", "float32"],
    "chunk_size_feed_forward": [8], "is_encoder_decoder": [True], "id2label": [{"0": "A", "1": "B", "2": "C"}],
    "label2id": [{"A": 0}], "problem_type": ["regression"],
    "vocab_size": [97], "hidden_size": [48], "intermediate_size": [80], "num_hidden_layers": [1, 3],
    "num_attention_heads": [2, 8], "num_key_value_heads": [1, 4, None, 3], "hidden_act": ["gelu", "relu", "swish"],
    "max_position_embeddings": [64], "initializer_range": [0.5], "rms_norm_eps": [1e-3, 0.1], "use_cache": [False],
    "pad_token_id": [5], "bos_token_id": [7, None], "eos_token_id": [None, [2, 3]], "pretraining_tp": [2],
    "tie_word_embeddings": [True],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "factor": 2.0},
                        {"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0},
                        {"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
                        {"rope_type": "proportional", "partial_rotary_factor": 0.5}],
    "attention_bias": [True], "attention_dropout": [0.5], "mlp_bias": [True], "head_dim": [32, 8, 24],
    "use_sliding_window": [True], "sliding_window": [7], "max_window_layers": [0, 1],
    "layer_types": [["full_attention", "sliding_attention"], ["chunked_attention"] * 2, ["full_attention"]],
    # no fields
    "is_causal": [False, 0], "per_layer_config": [{"0": {"intermediate_size": 48}}, {"1": {"num_key_value_heads": 1}}],
    "rope_theta": [500.0, 7], "rope_scaling": [{"type": "linear", "factor": 3.0}, {"type": "dynamic", "factor": 2.0}],
    "partial_rotary_factor": [0.5], "attention_chunk_size": [4], "quantization_config": [{"quant_method": "fp8"}],
    "original_max_position_embeddings": [32], "num_experts": [4], "final_logit_softcapping": [30.0],
    "attn_logit_softcapping": [50.0], "logits_scaling": [2.0], "residual_multiplier": [0.5], "no_rope_layers": [[0]],
    "query_pre_attn_scalar": [8], "transformers_weights": ["other.safetensors"], "auto_map": [{"AutoModel": "x.Y"}],
    "rope_interleaved": [True], "use_qk_norm": [True], "qk_layernorm": [True], "embedding_multiplier": [2.0],
    "attention_multiplier": [0.1], "mup_multiplier": [2.0], "is_decoder": [True], "temperature": [0.1],
}  # fmt: skip
TOGETHER: list[dict[str, Any]] = [
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 5000.0},
    {"tie_word_embeddings": True, "attention_bias": True},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0, "beta_fast": 8}},
]
WALK = [(key, value) for key, values in OTHERS.items() for value in values]


def compare(directory: Path, values: dict[str, Any]) -> str:
    """ "computed" if logits and transformers' agree, or the text of the refusal."""
    (directory / "config.json").write_text(json.dumps(values))
    try:
        twin = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), attn_implementation="eager", dtype=torch.float32
        ).eval()
        twin.config.return_dict = True  # of what it returns, not of what it computes
    except Exception as error:  # transformers has no such model; neither may we
        with pytest.raises((ArchitectureError, ValueError)):
            Architecture.from_config(values)
        return f"transformers: {error}"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.15 * noise)
    save_file({n: p.detach().clone() for n, p in twin.named_parameters()}, directory / "model.safetensors")
    try:
        model = load_pretrained(directory, fp32_policy())
    except ArchitectureError as refusal:
        return str(refusal)
    [ids] = random_sequences((64,), min(97, model.architecture.vocab))
    with torch.no_grad():
        ours, theirs = (
            model.logits(model(PackedBatch.from_sequences([ids]))),
            twin(torch.tensor([ids])).logits[0],
        )
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-4
    return "computed"


def config(kind: str, **over: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [FAMILIES[kind].causal_lm], **SIZES, **over}


@pytest.mark.parametrize("kind", BUILT)
def test_the_walk_meets_every_field_of_the_config_class(kind: str) -> None:
    """A field that a new version of transformers adds has no other value here yet, and fails this test."""
    assert {f.name for f in dataclasses.fields(CONFIG_MAPPING[kind])} <= OTHERS.keys()


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize(("key", "value"), WALK, ids=[f"{k}={str(v)[:30]}" for k, v in WALK])
def test_each_key_is_computed_or_refused_by_name(tmp_path: Path, kind: str, key: str, value: Any) -> None:
    """One key at another value: transformers' logits, or a refusal with the key in it."""
    found = compare(tmp_path, config(kind, **{key: value}))
    if found != "computed" and not found.startswith("transformers:"):
        assert key.removeprefix("rope_").split("_")[0] in found


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("over", TOGETHER, ids=[" ".join(over) for over in TOGETHER])
def test_keys_that_speak_of_one_thing_count_as_in_transformers(
    tmp_path: Path, kind: str, over: dict[str, Any]
) -> None:
    """Which of two keys counts is transformers' choice, or both are refused."""
    compare(tmp_path, config(kind, **over))


LEFT_OUT = [("rms_norm_eps",), ("rope_theta",), ("max_position_embeddings",), ("tie_word_embeddings",), ("head_dim",),
            ("hidden_act",), ("architectures",), ("sliding_window",), ("eos_token_id",), ("intermediate_size",),
            ("rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings", "hidden_act")]  # fmt: skip


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("keys", LEFT_OUT, ids=" ".join)
def test_left_out_keys_take_transformers_defaults(tmp_path: Path, kind: str, keys: tuple[str, ...]) -> None:
    """The model is the one that transformers makes of the same file."""
    values = {k: v for k, v in config(kind).items() if k not in keys}
    assert compare(tmp_path, values) == "computed"


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_of_the_planner_are_transformers(kind: str) -> None:
    """Heads of keys and values when the key is left out, and when it is null."""
    field = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[kind])}
    expected = field["num_key_value_heads"] or field["num_attention_heads"]
    family = FAMILIES[kind]
    heads = {"num_attention_heads": field["num_attention_heads"]}
    assert kv_heads(heads, family) == expected
    assert kv_heads(heads | {"num_key_value_heads": None}, family) == field["num_attention_heads"]
    if family.causal_lm:
        assert Architecture.from_config({"model_type": kind}).kv_heads == expected


WRONG_TYPES = [
    ("hidden_size", "64"), ("hidden_size", 64.0), ("hidden_size", None), ("hidden_size", 0), ("vocab_size", -3),
    ("num_hidden_layers", True), ("num_attention_heads", [4]), ("rms_norm_eps", "1e-6"), ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")), ("rms_norm_eps", None), ("rope_theta", 0), ("rope_theta", -1.0),
    ("rope_theta", "10000"), ("rope_theta", None), ("tie_word_embeddings", "false"), ("tie_word_embeddings", 1),
    ("attention_bias", "true"), ("hidden_act", None), ("eos_token_id", "2"), ("eos_token_id", [2, None]),
    ("rope_scaling", "linear"), ("rope_scaling", [2]), ("rope_scaling", {"type": 3}),
    ("rope_scaling", {"type": "linear"}), ("rope_scaling", {"type": "linear", "factor": "2"}),
    ("rope_scaling", {"type": "linear", "factor": 0}), ("rope_scaling", {"type": "linear", "factor": float("inf")}),
    ("rope_scaling", {"type": "yarn", "factor": 2.0, "truncate": "no"}), ("max_position_embeddings", 128.5),
    ("rope_scaling", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}),
    ("layer_types", "full_attention"), ("sliding_window", -4), ("sliding_window", "9"), ("max_window_layers", "x"),
    ("head_dim", 17), ("model_type", None), ("model_type", "gemma2"), ("model_type", ["llama"]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("key", "value"), WRONG_TYPES, ids=[f"{k}={str(v)[:40]}" for k, v in WRONG_TYPES])
def test_values_of_no_meaning_are_refused_by_name(kind: str, key: str, value: Any) -> None:
    """Never a KeyError or TypeError from within, never a guess."""
    with pytest.raises(ArchitectureError) as caught:
        Architecture.from_config(config(kind) | {key: value})
    assert key.removeprefix("rope_scaling").split("_")[0] in str(caught.value)
