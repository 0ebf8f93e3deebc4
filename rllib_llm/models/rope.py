"""Rotary embedding parameters of a config: which scalings there are, and the inverse frequencies that each gives.

The formulas and their order of operations are transformers' (`modeling_rope_utils`): equal bits are tested. Sources:
"linear": position interpolation, arXiv:2306.15595; "dynamic": NTK-aware scaling; "yarn": arXiv:2309.00071; "llama3":
the Llama 3.1 release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
           "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # fmt: skip
# rope_type -> (keys that must be there, keys that may)
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"},
    ),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters; `kind` is the config's rope_type, which says what of the rest counts."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    attention_factor: float = 1.0
    """What cos and sin are multiplied by; 1 in all kinds but yarn."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], in the operation order of transformers.modeling_rope_utils (equal bits are
        tested)."""
        # On CPU whatever the default device: pow differs between devices, and both sides must start from one table.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
        if self.kind == "yarn":
            return self._yarn(self.theta**exponent, head_dim)
        inv_freq = 1.0 / (self._base(head_dim) ** exponent)
        if self.kind == "linear":
            return inv_freq / self.factor
        return self._llama3(inv_freq) if self.kind == "llama3" else inv_freq

    def _base(self, head_dim: int) -> float:
        if self.kind != "dynamic":
            return self.theta
        # At the length of the model's context. Up to there transformers uses these frequencies for every length;
        # beyond, each batch would have those of its longest sequence, and there are no positions beyond.
        stretch = self.factor * self.max_positions / self.max_positions - (self.factor - 1)
        return self.theta * stretch ** (head_dim / (head_dim - 2))

    def _llama3(self, inv_freq: torch.Tensor) -> torch.Tensor:
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

    def _yarn(self, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Fast dimensions as they are, slow ones interpolated, a ramp between the two."""

        def dimension(rotations: float) -> float:
            turns = math.log(self.original_max_positions / (rotations * 2 * math.pi))
            return (head_dim * turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - torch.clamp((dimensions - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def rope_values(values: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """The rope parameters of a config.json as one dict with transformers' current names.

    As transformers reads them: `rope_scaling`, the older key, counts before `rope_parameters`; a `rope_theta` inside
    counts before the one beside; an older `type` means `rope_type`.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        return {"rope_type": (given,)}  # no name of a type: refused with what stands there
    rope = dict(given)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", values.get("rope_theta", default_theta))
    if values.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    return rope


def rope_of(rope: Mapping[str, Any], max_positions: int) -> Rope:
    """`Rope` of what `rope_values` gave and `rope_problems` found nothing wrong with."""
    kind = rope["rope_type"]
    factor = float(rope.get("factor", 1.0)) if kind != "default" else 1.0
    original = rope.get("original_max_position_embeddings")
    scaled = kind in ("yarn", "llama3")
    return Rope(
        kind,
        float(rope["rope_theta"]),
        factor,
        float(rope["low_freq_factor"]) if kind == "llama3" else 1.0,
        float(rope["high_freq_factor"]) if kind == "llama3" else 1.0,
        (max_positions if original is None else original) if scaled else 0,
        max_positions if kind == "dynamic" else 0,
        _attention_factor(rope, factor) if kind == "yarn" else 1.0,
        float(rope.get("beta_fast") or 32),
        float(rope.get("beta_slow") or 1),
        rope.get("truncate", True),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return float(mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]))
    return mscale()


def rope_problems(rope: Mapping[str, Any], head_dim: int | None) -> list[str]:
    """Why `rope`, of `rope_values`, cannot be computed, one sentence per key; empty if it can.

    head_dim: None if it is not known.
    """
    if any(isinstance(v, Mapping) for v in rope.values()):
        return ["rope_parameters differ by layer type: one set for all layers is implemented"]
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _KEYS:
        return [f"rope_parameters.rope_type={kind!r}: implemented are {', '.join(sorted(_KEYS))}"]
    required, optional = _KEYS[kind]
    found = [
        f"rope_parameters.{key}={rope[key]!r}: not used by rope_type {kind!r}, would be ignored"
        for key in sorted(set(rope) - required - optional - _COMMON)
        if rope[key] is not None
    ]
    found += [
        f"rope_parameters.{key} is missing (rope_type {kind!r})"
        for key in sorted(required)
        if rope.get(key) is None
    ]
    theta = rope["rope_theta"]
    if not is_number(theta) or theta <= (1 if kind == "yarn" else 0):
        least = "1" if kind == "yarn" else "0"
        found.append(
            f"rope_parameters.rope_theta={theta!r}: a number above {least} is needed (rope_type={kind!r})"
        )
    partial = rope.get("partial_rotary_factor")
    if partial is not None and (not is_number(partial) or partial != 1.0):
        found.append(f"partial_rotary_factor={partial!r}: only the full head is rotated here")
    return found + _scale_problems(rope, kind, required | optional, head_dim)


def _scale_problems(rope: Mapping[str, Any], kind: str, keys: set[str], head_dim: int | None) -> list[str]:
    found = []
    for key in _SCALES:
        value = rope.get(key)
        if key not in keys or value is None:
            continue
        may_be_zero = key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0 means the default
        if not is_number(value) or value < 0 or (value == 0 and not may_be_zero):
            found.append(f"rope_parameters.{key}={value!r}: a positive number is needed (rope_type {kind!r})")
        elif key == "original_max_position_embeddings" and type(value) is not int:
            found.append(f"rope_parameters.{key}={value!r}: a whole number is needed (rope_type {kind!r})")
    if "truncate" in keys and not isinstance(rope.get("truncate", True), bool):
        found.append(f"rope_parameters.truncate={rope['truncate']!r}: true or false is needed")
    if kind == "llama3" and not found and rope.get("low_freq_factor") == rope.get("high_freq_factor"):
        found.append(
            f"rope_parameters.high_freq_factor={rope.get('high_freq_factor')!r}: must differ from low_freq_factor, "
            "the frequencies between the two are divided by their difference"
        )
    if kind == "dynamic" and head_dim == 2:
        found.append(
            "rope_parameters.rope_type='dynamic' with head_dim=2: its exponent is head_dim / (head_dim - 2)"
        )
    return found


def is_number(value: Any) -> bool:
    """A finite int or float, as JSON writes numbers; not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
