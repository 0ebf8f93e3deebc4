# ruff: noqa: RUF009 - `doc` makes a dataclass field

"""The policy object: one frozen tree, its fingerprint, and what can be derived from it."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import coerce, rules, schema
from .adapters import formats_of
from .errors import PolicyError, PrecisionOverrideWarning, Violation
from .hashing import canonical_hash
from .schema import doc

if TYPE_CHECKING:
    from .adapters import AdapterSpec
    from .diff import Difference
    from .plan import Plan


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Everything that a training run says about numbers. Make one with `load_policy` or `from_dict`."""

    schema_version: int = doc(
        "version of this file format", low=schema.SCHEMA_VERSION, high=schema.SCHEMA_VERSION
    )
    name: str = doc("how the policy is called; not part of the fingerprint")
    description: str = doc("one line for people; not part of the fingerprint")
    operators: Literal["shared", "scheme"] = doc(
        "shared: both sides bind the same operator implementations; scheme: only formats and scales agree"
    )
    operator_overrides: dict[str, str] = doc(
        "for research: operators that may differ between the sides, each with a reason. Loud, and recorded"
    )
    compute_dtype: schema.Dtype = doc("activations between operators")
    gradient_dtype: schema.Dtype = doc("gradients between operators")
    master_dtype: schema.MasterDtype = doc(
        "the weights that the optimizer updates. split_float32: the numbers of float32 bit by bit, stored as their "
        "bfloat16 rounding, which is what is computed with, and a 16-bit remainder: no rounded copy is held"
    )
    optimizer_state_dtype: schema.MomentDtype = doc(
        "moments of the optimizer; its arithmetic is float32. bfloat16_stochastic: rounded up or down at random, right "
        "on average; blockwise_8bit: so too, in 8 bits with one scale per 128 elements"
    )
    loss_scaling: schema.LossScaling | None = doc("dynamic loss scale for fp16 gradients, or null")
    quantisation: schema.Quantisation = doc("how fp8 operands are made")
    linear: schema.Linear = doc("projections of attention and MLP, and MoE experts")
    lm_head: schema.LMHead = doc("projection to the vocabulary")
    embedding: schema.Embedding = doc("token embedding")
    norm: schema.Norm = doc("RMSNorm with residual addition")
    attention: schema.Attention = doc("rotary embedding and attention")
    activation: schema.Activation = doc("gated activation of the MLP")
    router: schema.Router = doc("gate of a mixture of experts")
    kv_cache: schema.KVCache = doc("keys and values kept while generating")
    exempt: schema.Exempt = doc("linear modules that stay in compute_dtype")
    ragged: Literal["pad", "exempt", "refuse"] = doc(
        "linear dimensions not multiples of 128. pad: with zeros; exempt: compute_dtype; refuse: an error"
    )
    adapters: schema.Adapters | None = dataclasses.field(
        default=None,  # policies written before there were adapters have no such key
        metadata=schema.described(
            "low-rank adapters, if the run trains some; null: all of it in compute_dtype"
        ),
    )
    logprobs: schema.Logprobs = doc("what the log-probability of a sampled token means")
    correction: schema.Correction = doc("importance correction of off-policy numerics")
    clip_calibration: schema.ClipCalibration = doc("clip range against quantisation noise")
    guard: schema.Guard = doc("tolerated train-rollout mismatch")

    def __post_init__(self) -> None:
        """Checks everything again, so that `dataclasses.replace` cannot make a policy that cannot be."""
        _, found = _read(type(self), self.to_dict())
        if found:
            raise PolicyError(f"policy '{self.name}'", found)
        for op, why in sorted(self.operator_overrides.items()):
            text = f"policy '{self.name}' lets operator '{op}' differ between training and rollout: {why}"
            warnings.warn(text, PrecisionOverrideWarning, stacklevel=4)

    @classmethod
    def from_dict(cls, data: dict[str, Any], origin: str = "") -> PrecisionPolicy:
        """A policy from a complete tree of plain data. Raises PolicyError with every violation in it."""
        if not isinstance(data, dict):
            raise PolicyError(
                "policy", [Violation("policy", data, "must be a mapping", "give a policy's keys")]
            )
        values, found = _read(cls, data)
        if found:
            name = data.get("name") if isinstance(data.get("name"), str) else "?"
            raise PolicyError(f"policy '{name}'{f' ({origin})' if origin else ''}", found)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON- and YAML-able); `from_dict` of it is equal to this policy."""
        return _plain(self)

    def to_yaml(self, comments: bool = True) -> str:
        """The policy as YAML text, complete, with the meaning of each key as a comment."""
        from .text import to_yaml

        return to_yaml(self, comments)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over the canonical JSON of everything that can change numbers: not of name,
        description, reasons of overrides, the acknowledgement `accept_uncorrected`, or the order of exempt
        patterns."""
        tree = self.to_dict()
        del tree["name"], tree["description"], tree["correction"]["accept_uncorrected"]
        tree["operator_overrides"] = sorted(tree["operator_overrides"])
        tree["exempt"]["modules"] = sorted(set(tree["exempt"]["modules"]))
        if self.adapters in (None, formats_of(self.compute_dtype)):  # the same numbers, said or not
            del tree["adapters"]
        return canonical_hash(tree)

    @property
    def scale_format(self) -> str:
        """fp32 | ue8m0, of every fp8 operand on both sides."""
        return self.quantisation.scale_format

    @property
    def scale_floor(self) -> float:
        """Smallest scale of an fp8 block."""
        return self.quantisation.scale_floor

    @property
    def uses_fp8(self) -> bool:
        """Whether any GEMM or saved tensor on either side is fp8."""
        formats = (getattr(self.linear, f.name) for f in dataclasses.fields(self.linear))
        return "fp8" in formats

    @property
    def off_policy_reasons(self) -> tuple[str, ...]:
        """Why the sides do not compute one distribution by construction; empty if they do."""
        return tuple(rules.on_policy_obstacles(self))

    @property
    def exactly_on_policy(self) -> bool:
        """Both sides compute the same distribution by construction: equal formats and shared operators."""
        return not self.off_policy_reasons

    def resolve(self, model_config: Any, adapter: AdapterSpec | None = None) -> Plan:
        """One row per module of the model (transformers config, its `to_dict()`, or config.json as a dict).

        adapter: adds two rows, A and B, for each linear that has one.

        Raises PolicyError for an unknown architecture, patterns and targets that match nothing, refused ragged
        dimensions, …
        """
        from .plan import resolve

        return resolve(self, model_config, adapter)

    def environment(self, engine: str = "vllm", device: str = "cuda") -> dict[str, str]:
        """Environment variables that this policy requires in a process of `engine` ("vllm" | "torch")."""
        from .environment import environment

        return environment(self, engine, device)

    def diff(self, other: PrecisionPolicy) -> list[Difference]:
        """Differences from this policy to `other`, each with its consequence; empty if equal in numbers."""
        from .diff import diff

        return diff(self, other)

    def __reduce__(self) -> Any:  # pickles as data, so that a cached fingerprint never travels
        return _unpickle, (self.to_dict(),)


def _read(cls: type, data: dict[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Field values and violations; rules run on whatever is well-formed, so that one message has both."""
    found: list[Violation] = []
    values = coerce.build_parts(cls, data, "", found)
    broken = set(coerce.hints(cls)) - set(values)
    return values, found + rules.check(types.SimpleNamespace(**values), broken)


def _unpickle(data: dict[str, Any]) -> PrecisionPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionOverrideWarning)  # said where the policy was loaded
        return PrecisionPolicy.from_dict(data)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return list(value)
    return dict(sorted(value.items())) if isinstance(value, dict) else value
