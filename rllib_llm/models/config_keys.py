"""Every key of a config.json that is understood, and what is refused.

An allow list: a key is computed (`_COMPUTED`, and the rope keys), known to be without effect on the numbers
(`_WITHOUT_EFFECT`), or must have the value that is its default in transformers (`_DEFAULTS`). Any other key is refused
by name: transformers, or the code that the model was trained with, may obey it. A null says nothing and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precision_policies.models import BUILT, FAMILIES, Family, head_dim, kv_heads
from rllib_llm.models.rope import is_number, rope_problems, rope_values

__all__ = ["config_problems", "known_keys"]


def _size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _token_ids(value: Any) -> bool:
    return all(type(v) is int for v in (value if isinstance(value, list | tuple) else [value]))


_COUNT = "a positive whole number"
_SWITCH = "true or false"
# key -> (what a value must be, in words, whether null has a meaning)
_COMPUTED: dict[str, tuple[Callable[[Any], bool], str, bool]] = {
    "vocab_size": (_size, _COUNT, False),
    "hidden_size": (_size, _COUNT, False),
    "intermediate_size": (_size, _COUNT, False),
    "num_hidden_layers": (_size, _COUNT, False),
    "num_attention_heads": (_size, _COUNT, False),
    "num_key_value_heads": (_size, _COUNT, True),
    "head_dim": (_size, _COUNT, True),
    "max_position_embeddings": (_size, _COUNT, False),
    "rms_norm_eps": (lambda v: is_number(v) and v >= 0, "a number of at least 0", False),
    "initializer_range": (lambda v: is_number(v) and v >= 0, "a number of at least 0", False),
    "tie_word_embeddings": (_flag, _SWITCH, False),
    "eos_token_id": (_token_ids, "a token id or a list of them", True),
    "bos_token_id": (_token_ids, "a token id", True),
    "pad_token_id": (_token_ids, "a token id", True),
}
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
_WINDOW_KEYS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
# Keys of no effect on logits: bookkeeping, training of other heads, kernels, and what only transformers' generate()
# reads (here `rollout.*` says how answers are sampled).
_WITHOUT_EFFECT = frozenset((
    "gradient_checkpointing",
    "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype",
    "torch_dtype", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "tokenizer_class", "prefix", "model_max_length", "max_sequence_length", "sep_token_id",
    "decoder_start_token_id", "is_decoder", "unsloth_version", "unsloth_fixed", "transformers.js_config",
    "is_llama_config", "_from_model_config", "return_dict", "use_return_dict", "output_hidden_states",
    "output_attentions", "tie_last_hidden_states", "torchscript", "use_bfloat16", "use_cache", "pretraining_tp",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_flash_attn_2_enabled",
    "experts_implementation", "_experts_implementation_internal", "ignore_keys_at_rope_validation", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip
_EXPERTS = "mixture-of-experts layers are not implemented"
# key -> (the value that may stand there, why no other)
_DEFAULTS: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "only 'silu' (SwiGLU) is implemented"),
    "attention_dropout": (0, "set it to 0, dropout makes the trainer differ from the sampler"),
    "is_causal": (True, "only causal attention is implemented"),
    "per_layer_config": ({}, "layers that differ from one another are not implemented"),
    "is_encoder_decoder": (False, "only decoders are implemented"),
    "add_cross_attention": (False, "only decoders are implemented"),
    "tie_encoder_decoder": (False, "only decoders are implemented"),
    "chunk_size_feed_forward": (0, "set it to 0"),
    "pruned_heads": ({}, "pruned heads are not implemented"),
    "rope_interleaved": (False, "only the layout of Hugging Face is implemented"),
    "use_mrope": (False, "only one position per token is implemented"),
    "num_experts": (0, _EXPERTS),
    "num_local_experts": (0, _EXPERTS),
    "n_routed_experts": (0, _EXPERTS),
    "moe_intermediate_size": (0, _EXPERTS),
}


def known_keys() -> frozenset[str]:
    """All keys that are understood for some family."""
    return (
        frozenset(_COMPUTED)
        | _ROPE
        | _WINDOW_KEYS
        | _WITHOUT_EFFECT
        | frozenset(_DEFAULTS)
        | {"quantization_config", "attention_bias", "mlp_bias"}
    )


def config_problems(values: Mapping[str, Any]) -> list[str]:
    """Every reason why a model cannot be built from these keys and values, one sentence each with key and value; empty
    if it can. Keys that are left out are not problems: they take transformers' defaults.
    """
    kind = values.get("model_type")
    found: list[str] = []
    if kind not in BUILT:
        planned = " (its policy can be planned, it is not built)" if _family(values) else ""
        found.append(f"model_type={kind!r}{planned}: implemented are {', '.join(BUILT)}")
    found += _ill_typed(values) + _not_default(values) + _quantised(values) + _biases(values)
    found += _architectures(values) + _unknown(values)
    if not found or kind not in BUILT:
        found += _heads(values)
    found += _windows(values)
    return found + rope_problems(rope_values(values), _head_dim(values))


def _family(values: Mapping[str, Any]) -> Family | None:
    kind = values.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def _ill_typed(values: Mapping[str, Any]) -> list[str]:
    found = [
        f"{key}={values[key]!r}: {words} is needed"
        for key, (fits, words, nullable) in _COMPUTED.items()
        if key in values and not (fits(values[key]) or (values[key] is None and nullable))
    ]
    if "rope_theta" in values and values["rope_theta"] is None:
        found.append("rope_theta=None: a number is needed, or leave the key out")
    return found


def _not_default(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={values[key]!r}: {why}"
        for key, (allowed, why) in _DEFAULTS.items()
        if key in values and not _is_default(key, values[key], allowed)
    ]


def _is_default(key: str, value: Any, allowed: Any) -> bool:
    if value is None:
        return key != "hidden_act"
    return bool(value == allowed) and (not isinstance(allowed, bool) or isinstance(value, bool))


def _quantised(values: Mapping[str, Any]) -> list[str]:
    given = values.get("quantization_config")
    if not given:
        return []
    method = given.get("quant_method", "?") if isinstance(given, Mapping) else given
    return [
        f"quantization_config (quant_method={method!r}): give the unquantised checkpoint, the precision "
        "policy decides what is quantised"
    ]


def _biases(values: Mapping[str, Any]) -> list[str]:
    """A bias key counts where the family has it under a key; elsewhere transformers passes over it, or it is false."""
    family = _family(values)
    found = []
    for key in ("attention_bias", "mlp_bias"):
        value = values.get(key)
        if value is None and values.get(key, "left out") == "left out":
            continue
        read = family is None or key in (family.qkv_bias, family.o_bias, family.mlp_bias)
        if not isinstance(value, bool):
            found.append(f"{key}={value!r}: true or false is needed")
        elif (
            not read
            and value
            and not (key == "attention_bias" and family is not None and family.qkv_bias is True)
        ):
            found.append(f"{key}={value!r}: {values['model_type']} models have no such biases")
    return found


def _architectures(values: Mapping[str, Any]) -> list[str]:
    """A model of another class has another head, another mask, or other layers behind the same keys."""
    family, given = _family(values), values.get("architectures")
    if not given or family is None or not family.causal_lm or list(given) == [family.causal_lm]:
        return []
    return [
        f"architectures={given!r}: only {family.causal_lm} is implemented for model_type {values['model_type']!r}"
    ]


def _unknown(values: Mapping[str, Any]) -> list[str]:
    known = known_keys()
    return [
        f"{key}={value!r}: not a key that is known here, it may change the model; remove it from config.json if the "
        "model was trained without it"
        for key, value in values.items()
        if key not in known and value is not None
    ]


def _heads(values: Mapping[str, Any]) -> list[str]:
    found = []
    family = _family(values)
    heads = values.get("num_attention_heads")
    if type(heads) is int and heads >= 1:
        kv = values.get("num_key_value_heads") or heads
        if family is not None:
            kv = kv_heads(values, family)
        if _size(kv) and heads % kv:
            found.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv}")
    width = _head_dim(values)
    if width is not None and width % 2:
        found.append(f"head_dim={width} is odd: rotary embedding needs pairs")
    return found


def _head_dim(values: Mapping[str, Any]) -> int | None:
    """None where the keys do not say it."""
    family = _family(values)
    if _size(values.get("head_dim")):
        return int(values["head_dim"])
    if family is None or not (_size(values.get("hidden_size")) and _size(values.get("num_attention_heads"))):
        return None
    return int(head_dim(values, family))


def _windows(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of sliding windows."""
    family = _family(values)
    style = family.windowed if family is not None else ""
    window, types = values.get("sliding_window"), values.get("layer_types")
    found = []
    if window is not None and not _size(window):
        found.append(f"sliding_window={window!r}: {_COUNT} or null is needed")
    elif window is not None and not style:
        found.append(f"sliding_window={window}: layers of this family have no window")
    switch = values.get("use_sliding_window", False)
    if not isinstance(switch, bool) or (switch and style != "layers"):
        found.append(
            f"use_sliding_window={switch!r}: {_SWITCH if style == 'layers' else 'not read by this family'}"
        )
        switch = False
    first = values.get("max_window_layers", 0)
    if type(first) is not int:
        found.append(f"max_window_layers={first!r}: a whole number is needed")
    if types is None:
        return found
    if not isinstance(types, list | tuple):
        return [*found, f"layer_types={types!r}: a list of one type per layer is needed"]
    allowed = {"full_attention", "sliding_attention"} if style == "layers" else {"full_attention"}
    if other := sorted({str(t) for t in types} - allowed):
        found.append(f"layer_types contain {', '.join(other)}: implemented are {', '.join(sorted(allowed))}")
    elif "sliding_attention" in types and not (switch and values.get("sliding_window", 1)):
        found.append(
            "layer_types contain sliding_attention, but use_sliding_window or sliding_window switches it off"
        )
    layers = values.get("num_hidden_layers")
    if _size(layers) and len(types) != layers and not other:
        found.append(f"layer_types has {len(types)} entries, num_hidden_layers={layers}")
    return found
