"""What a user can set, one frozen dataclass per fluent group of `GRPOConfig`.

`GRPOConfig` stores each group as a plain dict (RLlib copies, pickles and searches plain dicts well and
compares numpy arrays and tensors badly); `parse` turns such a dict into the dataclass and reports every
unknown key and ill-typed value at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rllib_llm.sync.topology import WeightTransport

__all__ = [
    "GRPOSettings",
    "ModelSettings",
    "PrecisionSettings",
    "RolloutSettings",
    "closest",
    "defaults",
    "describe",
    "parse",
    "parse_rest",
]

S = TypeVar("S")


@dataclass(frozen=True)
class PrecisionSettings:
    """`.precision(...)`, stored as `config.precision_config`."""

    policy: str | dict = "unified-fp8"
    """name of a shipped policy, path of a YAML file, or the dict of a policy"""
    allow_precision_change: bool = False
    """let a checkpoint be restored under another policy than the one it was written with"""


@dataclass(frozen=True)
class ModelSettings:
    """`.model(...)`, stored as `config.llm`."""

    path: str | None = None
    """directory in Hugging Face format, or the name of a shipped model ("tiny-chain")"""
    gradient_checkpointing: bool = False
    """recompute each layer in backward: less memory, about a third more compute"""
    reference_path: str | None = None
    """frozen model for the KL term; None means `path`, i.e. the weights training starts from"""
    max_sequence_length: int | None = None
    """longest prompt plus completion in tokens; None means the model's max_position_embeddings"""


@dataclass(frozen=True)
class RolloutSettings:
    """`.rollout(...)`, stored as `config.rollout_config`."""

    engine: str = "torch"
    """"torch" (embedded, any device) or "vllm" """
    engine_options: dict = field(default_factory=dict)
    """passed to the engine's constructor"""
    group_size: int = 8
    """completions sampled for one prompt"""
    prompts_per_iteration: int = 16
    """prompts of one training iteration, over all env runners"""
    max_new_tokens: int = 64
    """token limit of one answer (of one turn)"""
    min_new_tokens: int = 0
    """the first so many tokens of an answer end nothing: end-of-sequence and stop ids have probability 0 there"""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off"""
    stop: tuple[str, ...] = ()
    """texts that end an answer, besides the tokenizer's end-of-sequence token"""
    stop_token_ids: tuple[int, ...] = ()
    max_turns: int = 1
    """model turns of one episode; an environment that has not finished by then is cut off"""
    max_prompt_tokens: int | None = None
    """prompts longer than this are an error of the task, counted and skipped"""
    eval_temperature: float = 0.0
    """temperature of `algo.evaluate()`; 0 is greedy. RLlib's `explore=False` also means greedy"""
    eval_samples: int = 1
    """answers per evaluation prompt (pass@1 is their mean)"""
    max_empty_samples: int = 3
    """consecutive iterations without one usable sample after which training stops with an error"""
    restart_timeout_s: float = 300.0
    """seconds to wait for one env runner to come back when none is left (vLLM takes a minute or two to start)"""
    push_timeout_s: float = 600.0
    """seconds an env runner has to confirm new weights"""
    sleep_while_learning: bool = False
    """engines give their GPU memory back while the learner computes: weights wait in host memory, the KV cache goes"""
    weight_transport: WeightTransport = "auto"
    """how weights reach engines in other processes; auto takes cuda_ipc on the learner's GPU, nccl between GPUs, else
    object_store; gloo is nccl's road over TCP. What was taken is in the log"""


@dataclass(frozen=True)
class GRPOSettings:
    """`.training(...)`, stored as `config.grpo`. `lr`, `num_epochs` and `grad_clip` are RLlib's own."""

    loss: str = "grpo"
    """name of a loss in rllib_llm/losses"""
    loss_config: dict = field(default_factory=dict)
    """further keyword arguments of that loss"""
    advantages: str | None = None
    """kind of advantages in rllib_llm/advantages.py; None takes the loss's own"""
    clip_low: float | None = None
    """the ratio is clipped to [1 - clip_low, 1 + clip_high]; None takes the loss's own"""
    clip_high: float | None = None
    kl_coeff: float = 0.0
    """weight of the KL to the frozen reference; 0 builds no reference model"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 regularises only as reward: as loss its expected gradient is zero (docs/algorithms.md)"""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: each token's advantage loses kl_coeff times the KL from it to the end of the answer"""
    entropy_coeff: float = 0.0
    minibatches_per_epoch: int = 1
    """optimiser steps per pass over the samples"""
    micro_batch_tokens: int = 8192
    """tokens of one forward/backward pass; changes memory and speed, not the update"""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    warmup_steps: int = 0
    """optimiser steps over which the learning rate rises linearly from lr/warmup_steps to lr"""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    """optimiser steps at which `lr_decay` reaches zero"""
    dynamic_sampling: bool = False
    """sample on until prompts_per_iteration groups have rewards that differ (DAPO)"""
    max_sample_rounds: int = 4
    """rounds that dynamic sampling may take in one iteration"""
    overlong_buffer: int = 0
    """DAPO's soft overlong punishment: tokens before max_new_tokens over which the penalty grows; 0 is off"""
    overlong_penalty: float = 1.0
    correction: dict | None = None
    """replaces the policy's correction, e.g. {"kind": "none"}; None keeps the policy's"""


GROUPS: dict[str, type] = {
    "precision_config": PrecisionSettings,
    "llm": ModelSettings,
    "rollout_config": RolloutSettings,
    "grpo": GRPOSettings,
}


def defaults(cls: type) -> dict[str, Any]:
    """The default values of a settings class as a plain dict."""
    return {
        f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        for f in dataclasses.fields(cls)
    }


def closest(name: str, known: typing.Iterable[str]) -> str:
    """ " (closest: 'x')", or an empty string when nothing looks like `name`."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (closest: {match[0]!r})" if match else ""


def parse(cls: type[S], values: dict[str, Any], prefix: str) -> tuple[S | None, list[str]]:
    """Builds `cls` from a dict.

    Returns (instance, []) or (None, violations): one sentence per unknown key and ill-typed value, with
    the full key, the value, the allowed type and the closest valid key.
    """
    hints, violations, known = typing.get_type_hints(cls), [], {}
    for key, value in values.items():
        if key not in hints:
            violations.append(f"{prefix}.{key} does not exist{closest(key, hints)}.")
            continue
        converted = _convert(hints[key], value)
        if isinstance(value, float) and math.isnan(value):  # passes every comparison that would refuse it
            violations.append(f"{prefix}.{key} = nan is no number; it must be {describe(hints[key])}.")
        elif converted is _ILL_TYPED:
            violations.append(f"{prefix}.{key} = {value!r} must be {describe(hints[key])}.")
        else:
            known[key] = converted
    return (None, violations) if violations else (cls(**known), [])


def parse_rest(cls: type[S], values: dict[str, Any]) -> tuple[S, set[str]]:
    """(`cls` from the entries that `parse` accepts, the names of those that it does not)."""
    bad = {key for key, value in values.items() if parse(cls, {key: value}, "")[0] is None}
    rest, _ = parse(cls, {key: value for key, value in values.items() if key not in bad}, "")
    assert rest is not None, "each entry was accepted"
    return rest, bad


_ILL_TYPED = object()


def _convert(hint: Any, value: Any) -> Any:
    """`value` as `hint` wants it (int -> float, list -> tuple), or _ILL_TYPED. No other conversions."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = (_convert(option, value) for option in args)
        return next((option for option in options if option is not _ILL_TYPED), _ILL_TYPED)
    if origin is Literal:
        return value if value in args else _ILL_TYPED
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _ILL_TYPED
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else args
        items = tuple(_convert(h, v) for h, v in zip(hints, value, strict=False))
        return items if len(items) == len(hints) == len(value) and _ILL_TYPED not in items else _ILL_TYPED
    if origin is dict:
        if not isinstance(value, dict):
            return _ILL_TYPED
        entries = {_convert(args[0], k): _convert(args[1], v) for k, v in value.items()}
        return entries if _ILL_TYPED not in entries and _ILL_TYPED not in entries.values() else _ILL_TYPED
    if hint is type(None):
        return None if value is None else _ILL_TYPED
    if isinstance(value, bool) and hint is not bool:  # bool is an int to Python, not to a reader
        return _ILL_TYPED
    if hint is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, hint) else _ILL_TYPED


def describe(hint: Any) -> str:
    """The type of a setting in words: `int`, `a list of str`, `one of 'k1', 'k2'`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in args)
    if origin is tuple:
        inner = describe(args[0])
        return f"a list of {inner}" if args[-1] is Ellipsis else f"a list of {len(args)} x {inner}"
    if origin is dict:
        return f"a mapping from {describe(args[0])} to {describe(args[1])}"
    return "null" if hint is type(None) else hint.__name__
