"""The policy's tolerance acting on the measured mismatch: warn, correct, or halt, saying which side
changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

from precision_policies.hashing import differing
from precision_policies.schema import GuardAction, GuardMetric


class GuardSpec(Protocol):
    """What `policy.guard` offers. tolerance: largest value of the metric; for bit_equal_share the largest
    share of tokens that may *differ*."""

    @property
    def metric(self) -> str: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def action(self) -> str: ...
    @property
    def patience(self) -> int: ...


@dataclass(frozen=True)
class Evidence:
    """What is known about both sides at the time of a check; every part is optional.

    attestations: side name ("train", "rollout/1", ...) -> Attestation or its dict.
    sent: tensor name -> hash of the last weight update; held: runner name -> what it reports to hold.
    """

    attestations: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class GuardVerdict:
    """action: "none" | "warn" | "correct" | "halt". message: empty only if nothing is wrong.
    violated: this check was beyond tolerance. consecutive: such checks in a row, this one included."""

    action: str
    message: str
    violated: bool
    consecutive: int


class Guard:
    """Counts consecutive checks beyond tolerance; from the `patience`-th on it asks for the policy's action.

    "correct" latches: `fired` stays true (also over a checkpoint, `get_state`), so a correction, once
    switched on, is not switched off by the smaller mismatch of one batch. The first evidence seen is the
    baseline for "which side changed"; `remember` sets it explicitly.
    """

    def __init__(self, spec: GuardSpec) -> None:
        for key, choices in (("metric", GuardMetric), ("action", GuardAction)):
            if getattr(spec, key) not in get_args(choices):
                raise ValueError(
                    f"guard.{key} = {getattr(spec, key)!r}: one of {', '.join(get_args(choices))}"
                )
        self.spec = spec
        self.consecutive = 0
        self.fired = False
        self._baseline: dict[str, dict[str, str]] = {}

    def remember(self, evidence: Evidence) -> None:
        """Makes these attestations the state that later ones are compared with."""
        self._baseline = {side: _flatten(_as_dict(a)) for side, a in evidence.attestations.items()}

    def check(self, metrics: Mapping[str, float], evidence: Evidence | None = None) -> GuardVerdict:
        """One verdict per iteration from `mismatch.metrics` over its tokens.

        A non-finite token is a violation whatever the metric. With no comparable token there is no evidence
        either way: action "none", a message, and the count stays. Raises KeyError if the metric is missing
        though tokens were compared.
        """
        evidence = evidence or Evidence()
        if not self._baseline and evidence.attestations:
            self.remember(evidence)
        tokens, lost = int(metrics["num_tokens"]), int(metrics.get("nonfinite_tokens", 0))
        if tokens == 0 and lost == 0:
            return GuardVerdict(
                "none", "precision guard: no token to compare in this iteration", False, self.consecutive
            )
        finding = self._finding(metrics, tokens, lost)
        if finding is None:
            self.consecutive = 0
            return GuardVerdict("none", "", False, 0)
        self.consecutive += 1
        due = self.consecutive >= self.spec.patience
        action = self.spec.action if due else "none"
        self.fired = self.fired or action == "correct"
        lines = [
            f"precision guard: {finding}; check {self.consecutive} in a row beyond tolerance "
            f"(guard.patience = {self.spec.patience}), action: {action}"
        ]
        lines += changed_sides(self._baseline, evidence) + hints(metrics)
        return GuardVerdict(action, "\n  ".join(lines), True, self.consecutive)

    def get_state(self) -> dict[str, Any]:
        """JSON-able state for a checkpoint."""
        return {"consecutive": self.consecutive, "fired": self.fired, "baseline": self._baseline}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `get_state`."""
        self.consecutive, self.fired = int(state["consecutive"]), bool(state["fired"])
        self._baseline = {side: dict(values) for side, values in state["baseline"].items()}

    def _finding(self, metrics: Mapping[str, float], tokens: int, lost: int) -> str | None:
        found = []
        if lost:
            found.append(f"{lost} of {tokens + lost} tokens have a non-finite log-probability")
        if tokens:
            name, limit = self.spec.metric, self.spec.tolerance
            value = float(metrics[name])
            if name == "bit_equal_share":
                name, value = "share of tokens that differ (1 - bit_equal_share)", 1.0 - value
            if not math.isfinite(value) or value > limit:
                found.append(f"{name} = {value:.4g} > guard.tolerance = {limit:.4g} over {tokens} tokens")
        return " and ".join(found) or None


def changed_sides(baseline: Mapping[str, Mapping[str, str]], evidence: Evidence) -> list[str]:
    """What attestations and receipts say about who changed: one line per side, then the weights, then the
    pair."""
    lines = []
    now = {side: _flatten(_as_dict(a)) for side, a in evidence.attestations.items()}
    for side, values in sorted(now.items()):
        if side not in baseline:
            lines.append(f"{side} side: was not there at the first check")
            continue
        changes = _differences(baseline[side], values)
        lines.append(
            f"{side} side: " + ("unchanged since the first check" if not changes else "CHANGED: " + changes)
        )
    lines += _weight_lines(evidence)
    trainers = [side for side in now if side.startswith("train")]
    for side in sorted(now):
        if trainers and side not in trainers:
            differ = _differences(_contract(now[trainers[0]]), _contract(now[side]))
            if differ:
                lines.append(f"{trainers[0]} and {side} attest different numerics: {differ}")
    if not lines:
        lines.append("no attestation or weight receipt was given, so nothing tells which side changed")
    return lines


def hints(metrics: Mapping[str, float]) -> list[str]:
    """Known causes whose signature the numbers carry."""
    found = []
    enough = metrics.get("num_tokens", 0) >= 50  # by chance, 50 signs agree once in 2^50
    if enough and metrics.get("train_higher_share") == 0.0 and metrics.get("bit_equal_share", 1.0) < 0.5:
        found.append(
            "hint: the trainer is below the engine on every differing token, as when only the engine "
            "renormalises after top-p / top-k (rollout.top_p, rollout.top_k, policy.logprobs.truncation)"
        )
    shares = {
        k: v for k, v in metrics.items() if k.startswith("by_position/") and k.endswith("/bit_equal_share")
    }
    if len(shares) > 1:
        first, *rest = shares.values()
        if first == 1.0 and min(rest) < 1.0:
            found.append(
                "hint: equal in the first positions, different later: look at attention and the KV cache"
            )
    return found


def _weight_lines(evidence: Evidence) -> list[str]:
    lines = []
    for runner, hashes in sorted(evidence.held.items()):
        wrong = [n for n, (sent, _) in differing(evidence.sent, hashes).items() if sent is not None]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            lines.append(f"{runner}: holds OTHER BYTES than were sent for {', '.join(wrong[:5])}{more}")
    if evidence.held and not lines:
        lines.append("weights: every receipt matches what was sent")
    return lines


_CONTRACT_KEYS = ("policy_fingerprint", "plan_hash", "scale_format", "operators")


def _contract(values: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in values.items() if k.split(".")[0] in _CONTRACT_KEYS}


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    changed = differing(before, after).items()
    return "; ".join(f"{key}: {_short(was)} -> {_short(now)}" for key, (was, now) in changed)


def _short(value: str | None) -> str:
    """Hashes by their first 12 digits."""
    if value is None:
        return "(absent)"
    return f"{value[:12]}…" if len(value) >= 40 and set(value) <= set("0123456789abcdef") else value


def _as_dict(attestation: Any) -> Mapping[str, Any]:
    return attestation if isinstance(attestation, Mapping) else attestation.to_dict()


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys to text; without what is informational, the side's own name, and weights (they change each
    step)."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if not prefix and key in ("informational", "side", "weights"):
            continue
        if isinstance(value, Mapping):
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = str(value)
    return out
