"""Precision policies: one frozen object that says everything about numbers, for both sides of a training run.

Imports neither torch, ray nor vllm. Start with `load_policy("unified-fp8")`; docs/policies.md explains the
rest.
"""

from .adapters import AdapterSpec
from .contract import Attestation, compare_attestations
from .diff import Difference
from .errors import PolicyError, PrecisionMismatchError, PrecisionOverrideWarning, Violation
from .loading import available, from_yaml, load_policy
from .plan import ModulePlan, Plan
from .policy import PrecisionPolicy

__all__ = [
    "AdapterSpec",
    "Attestation",
    "Difference",
    "ModulePlan",
    "Plan",
    "PolicyError",
    "PrecisionMismatchError",
    "PrecisionOverrideWarning",
    "PrecisionPolicy",
    "Violation",
    "available",
    "compare_attestations",
    "from_yaml",
    "load_policy",
]
