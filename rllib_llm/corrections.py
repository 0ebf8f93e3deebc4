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
geometric_mask  1 if G inside lower .. upper else 0   lower, upper     verl's geometric rejection, SkyRL
product_mask    1 if P inside lower .. upper else 0   lower, upper     SkyRL

`veto` (any kind): weight 0 on a whole response that has a token with rho_t < veto (verl, slime).
Everything is fp32 in log space; a log-ratio is clamped to +-20 before exp, and bounds are compared in logs,
before the clamp. Weights carry no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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
class Correction:
    """A correction by name. lower, upper: bounds of the ratio (not of its log), None: no bound on that
    side."""

    kind: str
    lower: float | None = None
    upper: float | None = None
    veto: float | None = None


class Kind(NamedTuple):
    """level: what one ratio spans. effect outside the bounds: "truncate" to the bound, "mask" (0 outside, the
    ratio inside) or "gate" (0 outside, 1 inside). needs: bounds that must be given; takes: bounds that may
    be."""

    level: str  # "token" | "sequence_sum" | "sequence_mean"
    effect: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]


_BOTH = ("lower", "upper")
KINDS: dict[str, Kind] = {
    "none": Kind("token", "none", (), ()),
    "tis_token": Kind("token", "truncate", ("upper",), ("upper",)),
    "tis_sequence": Kind("sequence_sum", "truncate", ("upper",), ("upper",)),
    "icepop": Kind("token", "mask", _BOTH, _BOTH),
    "mis_token": Kind("token", "mask", ("upper",), _BOTH),
    "mis_sequence": Kind("sequence_sum", "mask", ("upper",), _BOTH),
    "geometric_mask": Kind("sequence_mean", "gate", _BOTH, _BOTH),
    "product_mask": Kind("sequence_sum", "gate", _BOTH, _BOTH),
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
    if correction.kind == "none" and getattr(correction, "veto", None) is None:
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
        weights = torch.where(trained, torch.where(vetoed, 0.0, weights), 1.0)
        flags = {"fraction_high": above, "fraction_low": below, "veto_fraction": vetoed}
        flags |= {"zero_fraction": weights == 0, "nonfinite_fraction": ~finite}
        metrics = _statistics(bounded_exp(log_ratio), weights, flags, finite, trained)
    return weights, metrics


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
        raise ValueError("correction_weights:\n  " + "\n  ".join(wrong))
    return KINDS[correction.kind]


def correction_violations(correction: CorrectionSpec) -> list[str]:
    """What is wrong with kind and bounds, one sentence each; empty for a correction that can be applied."""
    kind, wrong = KINDS.get(correction.kind), []
    if kind is None:
        return [f"correction.kind = {correction.kind!r}: one of {', '.join(KINDS)}"]
    values = {key: getattr(correction, key, None) for key in (*_BOTH, "veto")}
    given = {key: value for key, value in values.items() if value is not None}
    if no_numbers := [k for k, v in given.items() if isinstance(v, bool) or not isinstance(v, (int, float))]:
        return [f"correction.{key} = {given[key]!r}: a bound of a ratio is a number" for key in no_numbers]
    for key in _BOTH:
        value = getattr(correction, key)
        if key in kind.needs and value is None:
            wrong.append(f"correction.{key} is None: kind {correction.kind} needs this bound of the ratio")
        if key not in kind.takes and value is not None:
            wrong.append(f"correction.{key} = {value}: kind {correction.kind} has no such bound")
    wrong += [
        f"correction.{key} = {value}: a bound of a ratio is {'> 0' if key == 'upper' else '>= 0'}"
        for key, value in given.items()
        if not (value > 0 or (value == 0 and key != "upper"))
    ]
    lower, upper = correction.lower, correction.upper
    if lower is not None and upper is not None and not lower < upper:
        wrong.append(f"correction.lower = {lower} must be < correction.upper = {upper}")
    return wrong


def _check_shapes(*tensors: Tensor) -> None:
    shapes = [tuple(t.shape) for t in tensors]
    if len(shapes[0]) != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"correction_weights: old_logp, rollout_logp, mask, sequence_ids must be [T], got {shapes}."
        )
