"""Differences between two policies, said as consequences for the numbers, the memory and the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .adapters import adapter_formats
from .environment import expected
from .memory import MASTER_BYTES, MOMENT_BYTES
from .schema import BLOCK

if TYPE_CHECKING:
    from .policy import PrecisionPolicy


@dataclass(frozen=True)
class Difference:
    """One key in which two policies differ, both values, and what follows from it."""

    key: str
    ours: Any
    theirs: Any
    consequence: str

    def __str__(self) -> str:
        return f"{self.key}: {self.consequence}"


_CLASS = {
    "linear": "projections",
    "lm_head": "lm_head",
    "embedding": "embedding",
    "norm": "norms",
    "attention": "attention",
    "activation": "MLP activation",
    "router": "routers",
    "kv_cache": "KV cache",
    "adapters": "adapters",
}
_KEY = {
    "train_forward": "training forward",
    "rollout_forward": "rollout",
    "dgrad": "input-gradient GEMM (dgrad)",
    "wgrad": "weight-gradient GEMM (wgrad)",
    "saved": "saved for backward",
    "residual": "residual stream",
    "inner": "A x",
}
_SUBJECT = {
    "linear.rollout_forward": "rollout weights",
    "linear.train_forward": "training forward weights",
    "operators": "operator implementations",
    "operator_overrides": "operators that may differ",
    "compute_dtype": "activations between operators",
    "gradient_dtype": "gradients between operators",
    "master_dtype": "master weights",
    "optimizer_state_dtype": "optimizer moments",
    "loss_scaling": "loss scaling",
    "quantisation.scale_format": "scales of every fp8 block",
    "quantisation.scale_floor": "smallest scale of a block",
    "exempt.modules": "exempt patterns",
    "ragged": "dimensions that are not multiples of 128",
    "correction.kind": "correction",
    "guard.action": "mismatch beyond tolerance",
    "guard.tolerance": "tolerated mismatch",
    "logprobs.truncation": "top-k / top-p sampling",
    "logprobs.temperature": "temperature other than 1",
}
_WORDS = {
    "shared": "the same on both sides (compared by source hash)",
    "scheme": "each side its own (only formats compared)",
    "halt": "stops the run",
    "warn": "is logged",
    "correct": "switches the correction on",
}
_BYTES = {"fp8": 1 + 4 / BLOCK, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
_OWN = ("schema_version", "name", "description")


def diff(ours: PrecisionPolicy, theirs: PrecisionPolicy) -> list[Difference]:
    """See PrecisionPolicy.diff. Keys in the order of the tree, then what follows from the whole."""
    a, b = _flatten(_said(ours)), _flatten(_said(theirs))
    found = []
    for key in [k for k in a if k not in _OWN] + [k for k in b if k not in a]:
        one, other = a.get(key), b.get(key)
        if one != other:
            text = f"{_subject(key)}: {_show(ours, key, one)} → {_show(theirs, key, other)}"
            found.append(Difference(key, one, other, text + _effect(key, one, other)))
    return found + _derived(ours, theirs) if found else []


def _said(policy: PrecisionPolicy) -> dict[str, Any]:
    """The policy's tree with what a null of `adapters` stands for."""
    return {**policy.to_dict(), "adapters": dataclasses.asdict(adapter_formats(policy))}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        whole = not isinstance(value, dict) or f"{prefix}{key}" in ("operator_overrides", "loss_scaling")
        flat |= {f"{prefix}{key}": value} if whole else _flatten(value, f"{prefix}{key}.")
    return flat


def _subject(key: str) -> str:
    if key in _SUBJECT:
        return _SUBJECT[key]
    section, _, rest = key.partition(".")
    if section in _CLASS:
        return f"{_CLASS[section]}, {_KEY.get(rest, rest.replace('_', ' '))}"
    return key.replace(".", ", ").replace("_", " ")


def _show(policy: PrecisionPolicy, key: str, value: Any) -> str:
    if value == "fp8":
        q = policy.quantisation
        block: str = q.weight_block if key.endswith("forward") else q.activation_block
        columns = key.endswith("wgrad") or (key.endswith("saved") and policy.linear.wgrad == "fp8")
        block = q.column_block if columns else block
        scales = "" if q.scale_format == "fp32" else f", {q.scale_format} scales"
        return f"{q.code_format} {block.replace('x', '×')}{scales}"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v if isinstance(v, str) else f'{v:g}'}" for k, v in value.items()) or "none"
    return _WORDS.get(value, str(value)) if isinstance(value, str) else f"{value:g}"


def _effect(key: str, one: Any, other: Any) -> str:
    """What a change of format costs or saves in memory, where it is a ratio of stored bytes."""
    stored = {
        "linear.rollout_forward": ("weight bytes in the engine and on the wire", _BYTES),
        "linear.saved": ("bytes saved", _BYTES),
        "master_dtype": ("bytes of master weights", MASTER_BYTES),
        "optimizer_state_dtype": ("bytes of moments", MOMENT_BYTES),
    }
    if key not in stored:
        return ""
    what, sizes = stored[key]
    if sizes[one] != sizes[other]:
        return f" ({what} ×{sizes[other] / sizes[one]:.2f})"
    return ""


def _derived(ours: PrecisionPolicy, theirs: PrecisionPolicy) -> list[Difference]:
    found = []
    one, other = ours.exactly_on_policy, theirs.exactly_on_policy
    if one != other:
        why = "; ".join((theirs if one else ours).off_policy_reasons)
        side = "because of" if one else "no longer"
        text = f"on-policy: {_yes(one)} → {_yes(other)} ({side} {why})"
        found.append(Difference("exactly_on_policy", one, other, text))
    before, after = expected(ours), expected(theirs)
    for name in sorted(before):
        if before[name] != after[name]:
            text = f"environment: {name}={before[name]} → {after[name]}"
            found.append(Difference(f"environment.{name}", before[name], after[name], text))
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "no"
