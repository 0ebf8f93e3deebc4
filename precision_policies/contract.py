"""The contract: what each side attests about itself, and the comparison that stops a run.

What can change bits is compared; what cannot (host name, process id, paths) goes into `informational` and is
not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .coerce import FrozenDict
from .environment import UNSET, effective, environment, expected, switched
from .errors import PolicyError, PrecisionMismatchError, PrecisionOverrideWarning, Violation
from .hashing import differing

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
        for name in _MAPPINGS:
            if name in data and not isinstance(data[name], dict):
                found.append(Violation(name, data[name], "is not a mapping", "give Attestation.to_dict()"))
        if found:
            raise PolicyError("attestation", found)
        return cls(**data)


def compare_attestations(policy: PrecisionPolicy, a: Attestation, b: Attestation, *more: Attestation) -> None:
    """Raises PrecisionMismatchError with everything in which `b` (and `more`), set beside `a`, break the contract.

    Always compared: fingerprint (with the policy's own too), plan, scale format, weights that both hold,
    environment variables against the policy's table. Under `operators: shared` also operators, versions of
    libraries that both have, tensor parallelism, and any other variable that both attest. Operators that the
    policy overrides may differ; they are reported by a PrecisionOverrideWarning.
    """
    violations = list(_alone(policy, a))
    for other in (b, *more):
        violations += _alone(policy, other)
        violations += _pair(policy, a, other)
    if violations:
        others = ", ".join(other.side for other in (b, *more))
        subject = f"precision contract of policy '{policy.name}' between {a.side} and {others}"
        raise PrecisionMismatchError(subject, violations)


def _alone(policy: PrecisionPolicy, side: Attestation) -> Iterator[Violation]:
    yield from _identity(policy, side)
    yield from _environment(policy, side)
    if policy.operators == "shared" and not side.operators:
        remedy = "attest what is bound (precision_kernels.bound_implementations)"
        yield Violation(f"{side.side}.operators", {}, "are not attested, so sharing cannot be seen", remedy)


def _pair(policy: PrecisionPolicy, a: Attestation, b: Attestation) -> Iterator[Violation]:
    yield from _field("plan_hash", a, b, "resolve the policy on the same model config on both sides")
    yield from _pairwise(
        "weights", a, b, "send all weights again; if it stays, the engine changes them on load"
    )
    if policy.operators == "shared":
        yield from _operators(policy, a, b)
        yield from _pairwise("versions", a, b, "install the same version on both sides")
        yield from _pairwise("environment", a, b, "set it equally on both sides", without=expected(policy))
        yield from _field("tensor_parallel", a, b, "use one layout: partial sums are added in another order")


def _field(name: str, a: Attestation, b: Attestation, remedy: str) -> Iterator[Violation]:
    yield from _differs(name, a, getattr(a, name), b, getattr(b, name), remedy)


def _differs(
    key: str, a: Attestation, ours: Any, b: Attestation, theirs: Any, remedy: str
) -> Iterator[Violation]:
    if ours != theirs:
        problem = f"{b.side}.{key} = {theirs!r} is not equal"
        yield Violation(f"{a.side}.{key}", ours, problem, remedy)


def _identity(policy: PrecisionPolicy, side: Attestation) -> Iterator[Violation]:
    if side.policy_fingerprint != policy.fingerprint:
        problem = f"policy '{policy.name}' has {policy.fingerprint}"
        remedy = "give both sides the same policy (`rllib-llm policy diff` shows the difference)"
        yield Violation(f"{side.side}.policy_fingerprint", side.policy_fingerprint, problem, remedy)
    if side.scale_format != policy.scale_format:
        problem = f"the policy wants {policy.scale_format}"
        remedy = "the weights were quantised again on load: VLLM_USE_DEEP_GEMM_E8M0, docs/policies.md"
        yield Violation(f"{side.side}.scale_format", side.scale_format, problem, remedy)


def _environment(policy: PrecisionPolicy, side: Attestation) -> Iterator[Violation]:
    wanted = expected(policy)
    required = environment(policy, side.engine, side.device) if side.engine and side.device else {}
    for name in sorted(wanted.keys() & side.environment.keys() | required.keys()):
        value = side.environment.get(name, ABSENT)
        if value in (ABSENT, UNSET) and switched(name, side.environment):
            continue
        if effective(name, value) != wanted[name]:
            problem = f"the policy wants {wanted[name]!r}"
            remedy = f"start the process with {name}={wanted[name]} (policy.environment() gives all of them)"
            yield Violation(f"{side.side}.environment.{name}", value, problem, remedy)


def _pairwise(
    name: str, a: Attestation, b: Attestation, remedy: str, without: Collection[str] = ()
) -> Iterator[Violation]:
    for key, (ours, theirs) in differing(getattr(a, name), getattr(b, name)).items():
        if ours is not None and theirs is not None and key not in without:
            yield from _differs(f"{name}.{key}", a, ours, b, theirs, remedy)


def _operators(policy: PrecisionPolicy, a: Attestation, b: Attestation) -> Iterator[Violation]:
    remedy = "bind the same implementation on both sides, or override it with a reason (operator_overrides)"
    for op, (ours, theirs) in differing(a.operators, b.operators).items():
        one, other = (ABSENT if side is None else side for side in (ours, theirs))
        if ABSENT in (one, other) and not policy.exactly_on_policy:
            continue  # formats differ by policy, so one side may need operators that the other does not
        if op in policy.operator_overrides:
            text = f"operator '{op}' differs by override: {a.side} {one}, {b.side} {other}"
            warnings.warn(text, PrecisionOverrideWarning, stacklevel=2)
            continue
        yield from _differs(f"operators.{op}", a, one, b, other, remedy)
