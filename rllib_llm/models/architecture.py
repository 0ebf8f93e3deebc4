"""What a transformers config says about a dense decoder, and what of it we refuse.

`Architecture` is the only reader of configs in `rllib_llm.models`: everything downstream uses its fields.
The fields follow transformers' `LlamaForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`; a config
feature that would change the computation and is not implemented is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_ROPE_KEYS = {
    "default": {"rope_type", "rope_theta", "partial_rotary_factor"},
    "llama3": {
        "rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings",
    },
}  # fmt: skip
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


class ArchitectureError(ValueError):
    """A model configuration that this package does not implement; the message lists every unsupported
    feature."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters; `kind` is ``"default"`` or ``"llama3"`` (then the other four fields are
    set)."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], in the operation order of transformers.modeling_rope_utils (equal bits are
        tested)."""
        # On CPU whatever the default device: pow differs between devices, and both sides must start from one table.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
        inv_freq = 1.0 / (self.theta**exponent)
        if self.kind == "default":
            return inv_freq
        wavelength = 2 * torch.pi / inv_freq
        low = self.original_max_positions / self.low_freq_factor
        high = self.original_max_positions / self.high_freq_factor
        scaled = torch.where(wavelength > low, inv_freq / self.factor, inv_freq)
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * scaled / self.factor + smooth * scaled
        between = ~(wavelength < high) & ~(wavelength > low)
        return torch.where(between, blended, scaled)


@dataclass(frozen=True)
class Architecture:
    """Dimensions and switches of one dense decoder (all sizes in elements)."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rms_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    init_std: float

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """Read a transformers PretrainedConfig or its ``to_dict()``.

        Raises:
            ArchitectureError: lists every feature that is not implemented, with its key and value.
        """
        values = config_dict(config)
        problems = _unsupported(values)
        if problems:
            name = values.get("model_type", "?")
            raise ArchitectureError(
                f"model_type {name!r} cannot be built, {len(problems)} feature(s) not implemented:\n"
                + "\n".join(f"  - {p}" for p in problems)
            )
        kind = values["model_type"]
        attention_bias = bool(values.get("attention_bias", False))
        heads = values["num_attention_heads"]
        return cls(
            model_type=kind,
            hidden=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=_head_dim(values),
            ffn=values["intermediate_size"],
            vocab=values["vocab_size"],
            rms_eps=values["rms_norm_eps"],
            max_positions=values["max_position_embeddings"],
            rope=_rope(values),
            tied=bool(values.get("tie_word_embeddings", False)),
            # Qwen2 has q/k/v biases whatever attention_bias says, and never one on o_proj.
            qkv_bias=True if kind == "qwen2" else attention_bias,
            o_bias=False if kind == "qwen2" else attention_bias,
            mlp_bias=bool(values.get("mlp_bias", False)) if kind == "llama" else False,
            qk_norm=kind == "qwen3",
            init_std=values.get("initializer_range", 0.02),
        )


def config_dict(config: Any) -> dict[str, Any]:
    """`config` as a plain dict with transformers' current key names (``rope_parameters`` instead of the older
    ``rope_scaling`` + ``rope_theta``)."""
    values = dict(config) if isinstance(config, Mapping) else config.to_dict()
    if not values.get("rope_parameters"):
        rope = dict(values.get("rope_scaling") or {})
        older_key = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or older_key or "default"
        rope.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
        values["rope_parameters"] = rope
    return values


def _head_dim(values: Mapping[str, Any]) -> int:
    if values.get("head_dim"):
        return int(values["head_dim"])
    # transformers: Qwen3's default is 128, independent of the hidden size.
    return 128 if values["model_type"] == "qwen3" else values["hidden_size"] // values["num_attention_heads"]


def _rope(values: Mapping[str, Any]) -> Rope:
    rope = values["rope_parameters"]
    if rope["rope_type"] == "default":
        return Rope("default", float(rope["rope_theta"]))
    return Rope(
        "llama3",
        float(rope["rope_theta"]),
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """Every reason why this config cannot be built; empty when it can."""
    found: list[str] = []
    kind = values.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        found.append(f"model_type={kind!r}: implemented are {', '.join(SUPPORTED_MODEL_TYPES)}")
    found += [
        f"{key}={values[key]}: mixture-of-experts layers are not implemented"
        for key in _MOE_KEYS
        if values.get(key)
    ]
    if values.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act={values['hidden_act']!r}: only 'silu' (SwiGLU) is implemented")
    if values.get("quantization_config"):
        method = dict(values["quantization_config"]).get("quant_method", "?")
        found.append(f"quantization_config (quant_method={method!r}): give the unquantised checkpoint, the precision "
                     "policy decides what is quantised")  # fmt: skip
    if values.get("attention_dropout"):
        found.append(f"attention_dropout={values['attention_dropout']}: set it to 0, dropout makes the trainer differ "
                     "from the sampler")  # fmt: skip
    found += _unsupported_attention(values)
    found += _unsupported_rope(values)
    return found


def _unsupported_attention(values: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    layer_types = sorted({t for t in values.get("layer_types") or () if t != "full_attention"})
    # Qwen2/Qwen3 carry sliding_window but use it only with use_sliding_window; other families use it when
    # it is set.
    gated = values.get("model_type") in ("qwen2", "qwen3")
    if values.get("sliding_window") and (values.get("use_sliding_window") or not gated):
        found.append(f"sliding_window={values['sliding_window']}: only full causal attention is implemented")
    if layer_types:
        found.append(f"layer_types contain {', '.join(layer_types)}: only full_attention is implemented")
    heads = values.get("num_attention_heads") or 0
    kv_heads = values.get("num_key_value_heads") or heads
    if heads and heads % kv_heads:
        found.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if heads and kind_known(values) and _head_dim(values) % 2:
        found.append(f"head_dim={_head_dim(values)} is odd: rotary embedding needs pairs")
    return found


def kind_known(values: Mapping[str, Any]) -> bool:
    """Whether `_head_dim` may be asked: the sizes that it reads are present."""
    return "model_type" in values and bool(values.get("head_dim") or values.get("hidden_size"))


def _unsupported_rope(values: Mapping[str, Any]) -> list[str]:
    rope = values["rope_parameters"]
    if any(isinstance(v, Mapping) for v in rope.values()):
        return ["rope_parameters differ by layer type: one set for all layers is implemented"]
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KEYS:
        return [f"rope_parameters.rope_type={kind!r}: implemented are {', '.join(sorted(_ROPE_KEYS))}"]
    found = [
        f"rope_parameters.{key}={rope[key]!r}: not used by rope_type {kind!r}, would be ignored"
        for key in sorted(set(rope) - _ROPE_KEYS[kind])
        if rope[key] is not None
    ]
    optional = {"partial_rotary_factor"}
    found += [
        f"rope_parameters.{key} is missing (rope_type {kind!r})"
        for key in sorted(_ROPE_KEYS[kind] - optional - set(rope))
    ]
    partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        found.append(f"partial_rotary_factor={partial}: only the full head is rotated here")
    return found
