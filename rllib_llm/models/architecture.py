"""What a transformers config says about a dense decoder, and what of it we refuse.

`Architecture` is the only reader of configs in `rllib_llm.models`: everything downstream uses its fields. The fields
follow the classes of transformers that `precision_policies.models.FAMILIES` names. `rllib_llm.models.config_keys` says
which keys there may be: one that would change the computation and is not implemented is refused, never ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from precision_policies.models import BUILT, FAMILIES, flag, head_dim, kv_heads
from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.models.config_keys import config_problems, known_keys
from rllib_llm.models.rope import Rope, rope_of, rope_values

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "Architecture",
    "ArchitectureError",
    "Rope",
    "plain_config",
    "refuse_windows",
    "window_problem",
]

SUPPORTED_MODEL_TYPES = BUILT


class ArchitectureError(RllibLLMError, InputError, ValueError):
    """A model configuration that this package does not implement; the message lists every unsupported
    feature."""


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
    windows: tuple[int, ...] = ()
    """Per layer, how many tokens a query sees, itself among them; 0: all before it. () if no layer has a window."""

    @classmethod
    def from_config(cls, config: Any) -> Architecture:
        """Read a transformers PretrainedConfig, its ``to_dict()``, or the content of a config.json.

        Keys that are left out take transformers' defaults.

        Raises:
            ArchitectureError: lists every key that is not implemented, with its value.
        """
        given = dict(config) if isinstance(config, Mapping) else config.to_dict()
        _refuse(given, config_problems(given))
        values = _completed(given) if isinstance(config, Mapping) else given
        family = FAMILIES[values["model_type"]]
        max_positions = values["max_position_embeddings"]
        return cls(
            model_type=values["model_type"],
            hidden=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=values["num_attention_heads"],
            kv_heads=kv_heads(values, family),
            head_dim=head_dim(values, family),
            ffn=values["intermediate_size"],
            vocab=values["vocab_size"],
            rms_eps=values["rms_norm_eps"],
            max_positions=max_positions,
            rope=rope_of(rope_values(values), max_positions),
            tied=bool(values["tie_word_embeddings"]),
            qkv_bias=flag(values, family.qkv_bias),
            o_bias=flag(values, family.o_bias),
            mlp_bias=flag(values, family.mlp_bias),
            qk_norm=family.qk_norm,
            init_std=values["initializer_range"],
            windows=_windows(values, family.windowed),
        )

    @property
    def window(self) -> int:
        """The sliding window of the layers that have one, in tokens; 0 if none has."""
        return max(self.windows, default=0)


def plain_config(config: Any) -> Any:
    """A transformers config with the known keys of `config` alone: what an engine has attached, and the name of the
    class that it runs, are left behind."""
    known = known_keys() - {"model_type", "architectures"}
    values = {k: v for k, v in config.to_dict().items() if k in known}
    return AutoConfig.for_model(config.model_type, **values)


def window_problem(architecture: Architecture, max_model_len: int | None) -> str | None:
    """Why a model with sliding windows cannot run where only full attention is implemented: vLLM and CUDA; None where
    no sequence is longer than its window, so that it hides nothing.

    Args:
        max_model_len: most tokens of a sequence; None: all that the model supports.
    """
    longest = architecture.max_positions if max_model_len is None else max_model_len
    if not architecture.window or longest <= min(w for w in architecture.windows if w):
        return None
    return (
        f"sliding_window={architecture.window} with sequences of up to {longest} tokens: sliding windows are "
        "implemented on the CPU with engine 'torch' only; keep sequences within the window by "
        f"model.max_sequence_length (max_model_len of an engine) = {architecture.window}"
    )


def refuse_windows(architecture: Architecture, max_model_len: int | None) -> None:
    """Raises ArchitectureError if there is a `window_problem`."""
    if problem := window_problem(architecture, max_model_len):
        raise ArchitectureError(problem)


def _refuse(values: Mapping[str, Any], problems: list[str]) -> None:
    if problems:
        raise ArchitectureError(
            f"model_type {values.get('model_type', '?')!r} cannot be built, {len(problems)} feature(s) not "
            "implemented:\n" + "\n".join(f"  - {p}" for p in problems)
        )


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with transformers' defaults for keys that are left out, as its own config class fills them in."""
    kept = {k: copy.deepcopy(v) for k, v in values.items() if k != "model_type"}
    if kept.get("head_dim", 0) is None:
        del kept["head_dim"]
    try:
        return dict(AutoConfig.for_model(values["model_type"], **kept).to_dict())
    except Exception as error:  # whatever its validation raises: StrictDataclassError, KeyError, TypeError, …
        reason = f"transformers refuses these values: {type(error).__name__}: {error}"
        raise ArchitectureError(f"model_type {values['model_type']!r} cannot be built: {reason}") from error


def _windows(values: Mapping[str, Any], style: str) -> tuple[int, ...]:
    window, layers = values.get("sliding_window") or 0, values["num_hidden_layers"]
    if style == "all":
        found = [window] * layers
    elif style == "layers":
        types = values.get("layer_types") or ["full_attention"] * layers
        found = [window if t == "sliding_attention" else 0 for t in types]
    else:
        found = []
    # A window as wide as the context hides nothing.
    found = [w if w < values["max_position_embeddings"] else 0 for w in found]
    return tuple(found) if any(found) else ()
