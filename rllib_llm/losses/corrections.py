"""Importance corrections for policies whose rollouts are not sampled from the trained distribution.

With d_t = old_logp_t - rollout_logp_t (trainer before the update minus engine), rho_t = exp(d_t) and, per
response, product P = exp(sum_t d_t) and geometric mean G = exp(mean_t d_t) over its trained tokens:

kind            weight of each token                  bounds needed    known from
none            1                                     -
tis_token       min(rho_t, upper)                     upper            truncated importance sampling, Flash-RL
tis_sequence    min(P, upper)                         upper            verl, TRL
icepop          rho_t if inside lower .. upper else 0 lower, upper     IcePop (Ring-1T)
mis_token       rho_t if inside [lower ..] upper      upper            masked importance sampling, verl, TRL
mis_sequence    P if inside [lower ..] upper          upper            the same per response
geometric_mask  1 if G inside lower .. upper else 0   lower, upper     geometric rejection, SkyRL
product_mask    1 if P inside lower .. upper else 0   lower, upper     SkyRL

`gate` (with any kind): geometric_mask or product_mask with bounds of its own, multiplied in: truncated
weights of the responses that a gate keeps (verl's rollout_is with rollout_rs, OpenRLHF's seq-mask-tis).
`divisor`: with "all" (default; TRL's *_mask, OpenRLHF, NeMo-RL) a token of weight 0 still counts in the
loss's divisor, and KL and entropy still act on it; with "kept" (verl) it is taken out of the mask: out of the
divisor, the length of its response, KL and entropy. A step is then larger by one over the kept share.
`veto` (any kind): weight 0 on a whole response that has a token with rho_t < veto (verl, slime).
Everything is fp32 in log space; a log-ratio is clamped to +-20 before exp, and bounds are compared in logs,
before the clamp. Weights carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from precision_policies.corrections import bound_violations
from precision_policies.errors import Violation
from rllib_llm.losses.terms import bounded_exp, sequence_lengths, sequence_sums


class CorrectionSpec(Protocol):
    """What `policy.correction` offers; see `Correction`."""

    @property
    def kind(self) -> str: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float | None: ...
    @property
    def veto(self) -> float | None: ...


@dataclass(frozen=True)
class Gate:
    """Which responses are trained at all: those whose ratio is inside lower .. upper. kind: geometric_mask or
    product_mask."""

    kind: str
    lower: float
    upper: float
    veto: None = None


@dataclass(frozen=True)
class Correction:
    """A correction by name. lower, upper: bounds of the ratio (not of its log), None: no bound on that side.

    gate: sets the weights of rejected responses to 0, whatever the kind. divisor: "all" trained tokens, or only those
    that are "kept" (weight not 0): see the module.
    """

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Correction:
        """From the keys of a config. Raises TypeError for unknown ones; `correction_violations` says the rest."""
        gate = values.get("gate")
        return cls(**{**values, "gate": Gate(**gate) if isinstance(gate, Mapping) else gate})

    kind: str
    lower: float | None = None
    upper: float | None = None
    veto: float | None = None
    gate: Gate | None = None
    divisor: str = "all"


def plain_correction(correction: CorrectionSpec | None) -> dict[str, Any] | None:
    """Kind and bounds as plain data, for a checkpoint."""
    if correction is None:
        return None
    return {name: getattr(correction, name, None) for name in ("kind", "lower", "upper", "veto")}


def correction_from_plain(plain: dict[str, Any] | None) -> Correction | None:
    """Inverse of `plain_correction`."""
    return None if plain is None else Correction(**plain)


class Kind(NamedTuple):
    """level: what one ratio spans. effect outside the bounds (`precision_policies.corrections.BOUNDS`): "truncate" to
    the bound, "mask" (0 outside, the ratio inside) or "gate" (0 outside, 1 inside)."""

    level: str  # "token" | "sequence_sum" | "sequence_mean"
    effect: str


DIVISORS = ("all", "kept")
KINDS: dict[str, Kind] = {
    "none": Kind("token", "none"),
    "tis_token": Kind("token", "truncate"),
    "tis_sequence": Kind("sequence_sum", "truncate"),
    "icepop": Kind("token", "mask"),
    "mis_token": Kind("token", "mask"),
    "mis_sequence": Kind("sequence_sum", "mask"),
    "geometric_mask": Kind("sequence_mean", "gate"),
    "product_mask": Kind("sequence_sum", "gate"),
}


class _Layout(NamedTuple):
    mask: Tensor
    sequence_ids: Tensor
    num_sequences: int

    @classmethod
    def of(cls, mask: Tensor, sequence_ids: Tensor, num_sequences: int | None) -> _Layout:
        """With the number of sequences counted where it is None."""
        if num_sequences is None:
            num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
        return cls(mask, sequence_ids, num_sequences)


def active_correction(correction: Any, guard_fired: bool) -> Any | None:
    """`policy.correction` if it acts now, else None.

    It acts when it has a kind (or a veto), and its `when` is "always" (or absent) or the guard has fired.
    """
    acts = any(getattr(correction, key, None) is not None for key in ("veto", "gate"))
    if correction.kind == "none" and not acts:
        return None
    waits = getattr(correction, "when", "always") == "guard"
    return correction if guard_fired or not waits else None


def correction_weights(
    correction: CorrectionSpec,
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights for `LossInputs.correction_weights`, and statistics of the raw and of the applied weights.

    old_logp, rollout_logp, mask, sequence_ids: [T]; whole responses. num_sequences defaults to max id + 1.
    Returns weights fp32 [T], 1 at masked tokens, and fp32 scalars over the trained tokens (none: empty dict):
    raw_{mean,min,max,std,ess}: the ratio at the kind's level before bounds and veto (log clamped to +-20);
    weight_{mean,min,max,std,ess}: what is applied (ess left out when all are 0);
    fraction_high, fraction_low: tokens whose ratio is above / below the bounds; veto_fraction: tokens of
    vetoed responses; zero_fraction: tokens with weight 0; nonfinite_fraction: tokens without a finite pair.
    A token with a non-finite log-probability on either side has no ratio: its weight is 0 (under "none": 1),
    a sequence-level mask or gate drops its response, and a sequence-level truncation leaves it out of the
    product. Raises ValueError listing all bad kinds, bounds and shapes.
    """
    kind = _checked_kind(correction)
    _check_shapes(old_logp, rollout_logp, mask, sequence_ids)
    trained = mask.bool()
    layout = _Layout.of(trained, sequence_ids, num_sequences)
    with torch.no_grad():
        finite = torch.isfinite(old_logp) & torch.isfinite(rollout_logp)
        d = torch.where(finite & trained, old_logp.float() - rollout_logp.float(), 0.0)
        log_ratio = _log_ratio(kind.level, d, layout)
        above = _beyond(log_ratio, correction.upper, above=True)
        below = _beyond(log_ratio, correction.lower, above=False)
        weights = _bounded_weights(
            kind, correction.upper, log_ratio, above | below, trained & ~finite, layout
        )
        vetoed = _any_in_sequence(_beyond(d, getattr(correction, "veto", None), above=False), layout)
        weights = torch.where(
            trained, torch.where(vetoed | _gated(correction, d, finite, layout), 0.0, weights), 1.0
        )
        flags = {"fraction_high": above, "fraction_low": below, "veto_fraction": vetoed}
        flags |= {"zero_fraction": weights == 0, "nonfinite_fraction": ~finite}
        metrics = _statistics(bounded_exp(log_ratio), weights, flags, finite, trained)
    return weights, metrics


def _gated(correction: CorrectionSpec, d: Tensor, finite: Tensor, layout: _Layout) -> Tensor:
    """Bool [T]: tokens of the responses that the correction's gate rejects, also those with a ratio that is none."""
    gate = getattr(correction, "gate", None)
    if gate is None:
        return torch.zeros_like(layout.mask)
    ratio = _log_ratio(KINDS[gate.kind].level, d, layout)
    rejected = _beyond(ratio, gate.upper, above=True) | _beyond(ratio, gate.lower, above=False)
    return rejected | _any_in_sequence(layout.mask & ~finite, layout)


def _bounded_weights(
    kind: Kind, upper: float | None, log_ratio: Tensor, outside: Tensor, lost: Tensor, layout: _Layout
) -> Tensor:
    if kind.effect == "none":
        return torch.ones_like(log_ratio)
    if kind.effect == "truncate":
        return torch.where(lost, 0.0, bounded_exp(log_ratio).clamp(max=upper))
    if kind.level != "token":
        lost = _any_in_sequence(lost, layout)
    inside = bounded_exp(log_ratio) if kind.effect == "mask" else torch.ones_like(log_ratio)
    return torch.where(outside | lost, 0.0, inside)


def _log_ratio(level: str, d: Tensor, layout: _Layout) -> Tensor:
    """log of the ratio [T] at the given level, repeated on the tokens of a response; not clamped."""
    if level == "token":
        return d
    total = sequence_sums(d, *layout)
    if level == "sequence_mean":
        total = total / sequence_lengths(*layout).clamp(min=1)
    return total[layout.sequence_ids]


def _beyond(log_ratio: Tensor, bound: float | None, above: bool) -> Tensor:
    if bound is None or bound == 0:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    return log_ratio > math.log(bound) if above else log_ratio < math.log(bound)


def _any_in_sequence(flags: Tensor, layout: _Layout) -> Tensor:
    return (sequence_sums(flags.float(), *layout) > 0)[layout.sequence_ids]


def _statistics(
    raw: Tensor, weights: Tensor, flags: dict[str, Tensor], finite: Tensor, trained: Tensor
) -> dict[str, Tensor]:
    if not trained.any():
        return {}
    metrics = {name: flag[trained].float().mean() for name, flag in flags.items()}
    for name, values in (("raw", raw[trained & finite]), ("weight", weights[trained])):
        if values.numel() == 0:
            continue
        metrics |= {f"{name}_mean": values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
        metrics[f"{name}_std"] = values.std(correction=0)
        w = values.double()
        if w.any():
            metrics[f"{name}_ess"] = (w.sum().square() / (w.numel() * w.square().sum())).float()
    return metrics


def _checked_kind(correction: CorrectionSpec) -> Kind:
    if wrong := correction_violations(correction):
        raise ValueError("\n  ".join(["correction_weights:", *map(str, wrong)]))
    return KINDS[correction.kind]


def correction_violations(correction: CorrectionSpec) -> list[Violation]:
    """What is wrong with kind and bounds; empty for a correction that can be applied."""
    if correction.kind not in KINDS:
        remedy = f"use one of {', '.join(KINDS)}"
        return [Violation("correction.kind", correction.kind, "no such kind", remedy)]
    wrong: list[Violation] = []
    for key in ("lower", "upper", "veto"):
        value = getattr(correction, key, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            wrong.append(Violation(f"correction.{key}", value, "is not a number", "give a bound of a ratio"))
        elif not (value > 0 or (value == 0 and key != "upper")):
            remedy = f"a bound of a ratio is {'> 0' if key == 'upper' else '>= 0'}"
            wrong.append(Violation(f"correction.{key}", value, "out of range", remedy))
    return [*(wrong or bound_violations(correction)), *_gate_violations(correction)]


def _gate_violations(correction: CorrectionSpec) -> Iterator[Violation]:
    gate, divisor = getattr(correction, "gate", None), getattr(correction, "divisor", "all")
    if divisor not in DIVISORS:
        yield Violation("correction.divisor", divisor, "no such divisor", f"use one of {', '.join(DIVISORS)}")
    if gate is None:
        return
    gates = [name for name, kind in KINDS.items() if kind.effect == "gate"]
    if gate.kind not in gates:
        yield Violation("correction.gate.kind", gate.kind, "is no gate", f"use one of {', '.join(gates)}")
        return
    yield from bound_violations(gate, "correction.gate")


def _check_shapes(*tensors: Tensor) -> None:
    shapes = [tuple(t.shape) for t in tensors]
    if len(shapes[0]) != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"correction_weights: old_logp, rollout_logp, mask, sequence_ids must be [T], got {shapes}."
        )
