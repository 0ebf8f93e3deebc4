"""Which modules a model has: names, kinds, shapes, biases, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import MISSING, PolicyError, Violation, closest


class ModuleSpec(NamedTuple):
    """One module: Hugging Face checkpoint name without `.weight`, and what a plan needs to know about it.

    shape is (out, in) of a linear, (vocab, hidden) of an embedding, (dim,) of a norm. `fused` names the
    modules that engines compute in one GEMM, so that all of them must have one format; None if it stands
    alone.
    """

    name: str
    kind: str  # linear | lm_head | embedding | norm | router | expert
    shape: tuple[int, ...]
    bias: bool
    layer: int | None = None
    fused: str | None = None
    tied_to: str | None = None


@dataclass(frozen=True)
class Family:
    """What distinguishes the decoder of one `model_type` from Llama's.

    The one list of families: the planner knows all of them, `rllib_llm.models` builds those with a `causal_lm`.
    """

    causal_lm: str = ""  # transformers' class of a family that is trained and sampled here; "": planned only
    qkv_bias: bool | str = "attention_bias"  # constant, or the config key that says it
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    head_dim: int | None = None  # default when the config does not say; None: hidden_size / heads
    kv_heads: int | None = (
        None  # default when the key is left out; None: as many as heads, which null always means
    )
    windowed: str = ""  # "": no layer has a sliding window; "layers": those that `layer_types` says; "all"
    qk_norm: bool = False
    feedforward_norms: bool = False
    activation: str = "silu_mul"
    tied: bool = False  # default when the config does not say
    experts: bool = False
    expert_dim: str = "moe_intermediate_size"
    expert_block: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", mlp_bias="mlp_bias"),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, o_bias=False, kv_heads=8, windowed="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False, kv_heads=32, windowed="layers"),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128, kv_heads=32, qk_norm=True, windowed="layers"),
    "gemma": Family(head_dim=256, kv_heads=16, activation="gelu_mul", tied=True),
    "gemma2": Family(head_dim=256, kv_heads=4, activation="gelu_mul", tied=True, feedforward_norms=True),
    "gemma3_text": Family(
        head_dim=256, kv_heads=4, activation="gelu_mul", tied=True, feedforward_norms=True, qk_norm=True
    ),
    "mixtral": Family(
        qkv_bias=False,
        o_bias=False,
        kv_heads=8,
        experts=True,
        expert_dim="intermediate_size",
        expert_block="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    ),
    "qwen2_moe": Family(qkv_bias="qkv_bias", o_bias=False, kv_heads=16, experts=True, shared_expert=True),
    "qwen3_moe": Family(kv_heads=4, qk_norm=True, experts=True),
}
BUILT: tuple[str, ...] = tuple(kind for kind, family in FAMILIES.items() if family.causal_lm)
"""Values of `model_type` that `rllib_llm.models` builds; the others are planned only."""

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts")  # config.json and transformers' to_dict differ in the name
_DEFAULT_TRUE = ("qkv_bias",)


def config_dict(model_config: Any) -> dict[str, Any]:
    """Plain dict of a transformers config (anything with `to_dict`) or of a mapping."""
    data = model_config.to_dict() if hasattr(model_config, "to_dict") else model_config
    if not isinstance(data, dict):
        problem = "is neither a mapping nor has to_dict()"
        remedy = "give a transformers config or the content of config.json"
        raise PolicyError(
            "model config", [Violation("model_config", type(model_config).__name__, problem, remedy)]
        )
    return data


def modules_of(model_config: Any) -> list[ModuleSpec]:
    """Every module with weights, sorted by name. Raises PolicyError if the config does not say enough."""
    config = config_dict(model_config)
    family = _family(config)
    needed: tuple[str, ...] = _REQUIRED
    if family.experts:
        needed += (family.expert_dim, next((key for key in _EXPERTS if config.get(key)), _EXPERTS[0]))
    found = [v for key in needed if (v := _not_a_size(key, config.get(key, MISSING)))]
    if not found:
        heads, kv = config["num_attention_heads"], kv_heads(config, family)
        sizes = {"num_key_value_heads": kv, "head_dim": head_dim(config, family)}
        found = [v for key, value in sizes.items() if (v := _not_a_size(key, value))]
        if not found and heads % kv:
            found.append(Violation("num_key_value_heads", kv, f"does not divide {heads} heads", "correct it"))
    if found:
        raise PolicyError(f"model config ({config.get('model_type')})", found)
    return sorted(_modules(config, family))


def num_layers(model_config: Any) -> int:
    """Number of decoder layers."""
    return int(config_dict(model_config)["num_hidden_layers"])


def is_tied(model_config: Any) -> bool:
    """Whether lm_head and embedding are one tensor."""
    config = config_dict(model_config)
    tied = config.get("tie_word_embeddings")
    return bool(_family(config).tied if tied is None else tied)


def _family(config: dict[str, Any]) -> Family:
    kind = config.get("model_type", MISSING)
    if kind not in FAMILIES:
        problem = f"architecture not known to the planner{closest(kind, FAMILIES)}"
        remedy = f"known: {', '.join(FAMILIES)}"
        if isinstance(config.get("text_config"), dict):
            remedy += (
                f"; for the language part resolve on text_config ({config['text_config'].get('model_type')})"
            )
        raise PolicyError("model config", [Violation("model_type", kind, problem, remedy)])
    return FAMILIES[kind]


def _not_a_size(key: str, value: Any) -> Violation | None:
    if type(value) is int and value >= 1:
        return None
    return Violation(
        key, value, "is not a positive whole number", "give the complete config.json of the model"
    )


def kv_heads(config: Mapping[str, Any], family: Family) -> Any:
    """Heads of keys and values, as transformers reads the key, its absence and its null."""
    value = config.get("num_key_value_heads", family.kv_heads)
    return config["num_attention_heads"] if value is None else value


def _num_experts(config: dict[str, Any]) -> int:
    return next(int(config[key]) for key in _EXPERTS if config.get(key))


def head_dim(config: Mapping[str, Any], family: Family) -> Any:
    """Width of one head."""
    value = config.get("head_dim")
    default = family.head_dim or config["hidden_size"] // config["num_attention_heads"]
    return default if value is None else value


def flag(config: Mapping[str, Any], source: bool | str) -> bool:
    """A switch of a family: a constant, or what the config says under a key."""
    if isinstance(source, bool):
        return source
    value = config.get(source)
    return source in _DEFAULT_TRUE if value is None else bool(value)


def _modules(config: dict[str, Any], family: Family) -> Iterator[ModuleSpec]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embedding = "model.embed_tokens"
    yield ModuleSpec(embedding, "embedding", (vocab, hidden), False)
    for layer in range(config["num_hidden_layers"]):
        yield from _attention(config, family, layer)
        yield from _feedforward(config, family, layer)
    yield ModuleSpec("model.norm", "norm", (hidden,), False)
    yield ModuleSpec(
        "lm_head", "lm_head", (vocab, hidden), False, tied_to=embedding if is_tied(config) else None
    )


def _attention(config: dict[str, Any], family: Family, layer: int) -> Iterator[ModuleSpec]:
    hidden, head = config["hidden_size"], head_dim(config, family)
    heads = config["num_attention_heads"]
    kv = kv_heads(config, family)
    prefix, fused = f"model.layers.{layer}", f"model.layers.{layer}.self_attn.qkv_proj"
    bias = flag(config, family.qkv_bias)
    for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
        yield ModuleSpec(f"{prefix}.self_attn.{name}", "linear", (rows * head, hidden), bias, layer, fused)
    o_bias = flag(config, family.o_bias)
    yield ModuleSpec(f"{prefix}.self_attn.o_proj", "linear", (hidden, heads * head), o_bias, layer)
    if family.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ModuleSpec(f"{prefix}.self_attn.{name}", "norm", (head,), False, layer)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family.feedforward_norms else []
    for name in norms:
        yield ModuleSpec(f"{prefix}.{name}", "norm", (hidden,), False, layer)


def _is_sparse(config: dict[str, Any], family: Family, layer: int) -> bool:
    if not family.experts or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _feedforward(config: dict[str, Any], family: Family, layer: int) -> Iterator[ModuleSpec]:
    prefix, hidden = f"model.layers.{layer}", config["hidden_size"]
    if not _is_sparse(config, family, layer):
        bias = flag(config, family.mlp_bias)
        yield from _gated(f"{prefix}.mlp", hidden, config["intermediate_size"], bias, layer)
        return
    block, count, inner = f"{prefix}.{family.expert_block}", _num_experts(config), config[family.expert_dim]
    yield ModuleSpec(f"{block}.gate", "router", (count, hidden), False, layer)
    gate, up, down = family.expert_names
    for expert in range(count):
        one = f"{block}.experts.{expert}"
        yield ModuleSpec(
            f"{one}.{gate}", "expert", (inner, hidden), False, layer, f"{block}.experts.gate_up_proj"
        )
        yield ModuleSpec(
            f"{one}.{up}", "expert", (inner, hidden), False, layer, f"{block}.experts.gate_up_proj"
        )
        yield ModuleSpec(
            f"{one}.{down}", "expert", (hidden, inner), False, layer, f"{block}.experts.down_proj"
        )
    if family.shared_expert and config.get("shared_expert_intermediate_size"):
        width = config["shared_expert_intermediate_size"]
        yield from _gated(f"{block}.shared_expert", hidden, width, False, layer)
        yield ModuleSpec(f"{block}.shared_expert_gate", "router", (1, hidden), False, layer)


def _gated(block: str, hidden: int, inner: int, bias: bool, layer: int) -> Iterator[ModuleSpec]:
    for name in ("gate_proj", "up_proj"):
        yield ModuleSpec(f"{block}.{name}", "linear", (inner, hidden), bias, layer, f"{block}.gate_up_proj")
    yield ModuleSpec(f"{block}.down_proj", "linear", (hidden, inner), bias, layer)
