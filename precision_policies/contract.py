"""The contract: what each side attests about itself, and the comparison that stops a run.

What can change bits is compared; what cannot (host name, process id, paths) goes into `informational` and is
not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .coerce import FrozenDict
from .environment import effective, environment, expected
from .errors import PolicyError, PrecisionMismatchError, PrecisionOverrideWarning, Violation

if TYPE_CHECKING:
    from .policy import PrecisionPolicy

ABSENT = "<absent>"
_MAPPINGS = ("operators", "versions", "environment", "weights", "informational")


@dataclass(frozen=True)
class Attestation:
    """What one process says that it computes with.

    side: "train" | "rollout" (or any label that tells the process). operators: operator ->
    "name@version#sourcehash" of the implementation actually bound. versions: libraries and drivers that
    change bits. environment: variables read back in that process. weights: tensor name -> hash of what is
    held. engine ("torch" | "vllm") and device ("cpu" | "cuda"), where given, make the policy's whole table of
    variables required.
    """

    side: str
    policy_fingerprint: str
    plan_hash: str
    operators: dict[str, str]
    versions: dict[str, str]
    environment: dict[str, str]
    tensor_parallel: int
    scale_format: str
    weights: dict[str, str] = field(default_factory=dict)
    informational: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Attestation:
        """An attestation from `to_dict`. Raises PolicyError if keys are missing or unknown."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        needed = [n for n, f in known.items() if f.default is f.default_factory is dataclasses.MISSING]
        found = [
            Violation(k, data[k], "unknown key", "give Attestation.to_dict()") for k in data if k not in known
        ]
        found += [
            Violation(k, ABSENT, "missing", "give Attestation.to_dict()") for k in needed if k not in data
        ]
        if found:
            raise PolicyError("attestation", found)
        return cls(**data)


def compare_attestations(policy: PrecisionPolicy, a: Attestation, b: Attestation) -> None:
    """Raises PrecisionMismatchError listing everything in which `a` and `b` break the contract of `policy`.

    Always compared: fingerprint (with the policy's own too), plan, scale format, weights that both hold,
    environment variables against the policy's table. Under `operators: shared` also operators, versions of
    libraries that both have, tensor parallelism, and any other variable that both attest. Overridden
    operators are reported by a warning.
    """
    violations = list(_identity(policy, a, b))
    for side in (a, b):
        violations += _environment(policy, side)
    violations += _pairwise(
        "weights", a, b, "send the weights again; if it stays, the engine changes them on load"
    )
    if policy.operators == "shared":
        violations += _operators(policy, a, b)
        violations += _pairwise("versions", a, b, "install the same version on both sides")
        table = expected(policy)
        remedy = "set it equally on both sides"
        violations += [
            v for v in _pairwise("environment", a, b, remedy) if v.key.split("environment.")[1] not in table
        ]
        violations += _field(
            "tensor_parallel", a, b, "use one layout: partial sums are added in another order"
        )
    if violations:
        subject = f"precision contract of policy '{policy.name}' between {a.side} and {b.side}"
        raise PrecisionMismatchError(subject, violations)


def weight_receipt_violations(
    sent: Mapping[str, str], held: Mapping[str, str], side: str = "rollout"
) -> list[Violation]:
    """Differences between the hashes of tensors sent (name -> hash) and of those that `side` holds."""
    found = []
    for name in sorted(sent.keys() | held.keys()):
        ours, theirs = sent.get(name, ABSENT), held.get(name, ABSENT)
        if ours != theirs:
            problem = f"train sent {ours}, {side} holds {theirs}"
            remedy = "send all weights again; if it stays, the engine changes them on load"
            found.append(Violation(f"weights.{name}", ours, problem, remedy))
    return found


def _field(name: str, a: Attestation, b: Attestation, remedy: str) -> Iterator[Violation]:
    ours, theirs = getattr(a, name), getattr(b, name)
    if ours != theirs:
        yield Violation(name, ours, f"{a.side} has {ours!r}, {b.side} has {theirs!r}", remedy)


def _identity(policy: PrecisionPolicy, a: Attestation, b: Attestation) -> Iterator[Violation]:
    for side in (a, b):
        if side.policy_fingerprint != policy.fingerprint:
            problem = f"policy '{policy.name}' has {policy.fingerprint}"
            remedy = "give both sides the same policy (`rllib-llm policy diff` shows the difference)"
            yield Violation(f"{side.side}.policy_fingerprint", side.policy_fingerprint, problem, remedy)
        if side.scale_format != policy.scale_format:
            problem = f"the policy wants {policy.scale_format}"
            remedy = (
                "the weights were quantised again on load; see VLLM_USE_DEEP_GEMM_E8M0 in docs/policies.md"
            )
            yield Violation(f"{side.side}.scale_format", side.scale_format, problem, remedy)
    yield from _field("plan_hash", a, b, "resolve the policy on the same model config on both sides")


def _environment(policy: PrecisionPolicy, side: Attestation) -> Iterator[Violation]:
    wanted = expected(policy)
    required = environment(policy, side.engine, side.device) if side.engine and side.device else {}
    for name in sorted(wanted.keys() & side.environment.keys() | required.keys()):
        value = side.environment.get(name, ABSENT)
        if effective(name, value) != wanted[name]:
            problem = f"the policy wants {wanted[name]!r}"
            remedy = f"start the process with {name}={wanted[name]} (policy.environment() gives all of them)"
            yield Violation(f"{side.side}.environment.{name}", value, problem, remedy)


def _pairwise(name: str, a: Attestation, b: Attestation, remedy: str) -> Iterator[Violation]:
    ours, theirs = getattr(a, name), getattr(b, name)
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            problem = f"{a.side} has {ours[key]!r}, {b.side} has {theirs[key]!r}"
            yield Violation(f"{name}.{key}", ours[key], problem, remedy)


def _operators(policy: PrecisionPolicy, a: Attestation, b: Attestation) -> Iterator[Violation]:
    ours, theirs = a.operators, b.operators
    remedy = "bind the same implementation on both sides, or override it with a reason (operator_overrides)"
    for op in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(op, ABSENT), theirs.get(op, ABSENT)
        if one == other or (ABSENT in (one, other) and not policy.exactly_on_policy):
            continue  # formats differ by policy, so one side may need operators that the other does not
        if op in policy.operator_overrides:
            text = f"operator '{op}' differs by override: {a.side} {one}, {b.side} {other}"
            warnings.warn(text, PrecisionOverrideWarning, stacklevel=4)
            continue
        yield Violation(f"operators.{op}", one, f"{a.side} has {one}, {b.side} has {other}", remedy)
