"""Low-rank adapters (LoRA, arXiv 2106.09685): what a run says about them, and on which linears they sit.

y = W x + bias + scale * B (A x), A [rank, in], B [out, rank]. The formats of these products are the policy's section
`adapters`; rank, scale and places are the run's (`AdapterSpec`). Both go into the plan, so two sides that differ in
either do not agree on its hash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import PolicyError, Violation, closest
from .schema import FORMAT_OF_DTYPE, Adapters

if TYPE_CHECKING:
    from .models import ModuleSpec
    from .policy import PrecisionPolicy

__all__ = ["ALL_LINEAR", "MAX_RANK", "A", "AdapterSpec", "B", "adapter_formats", "places"]

MAX_RANK = 256
ALL_LINEAR = "all-linear"
"""PEFT's word for every projection of attention and MLP, not lm_head."""
A, B = "lora_A", "lora_B"
"""PEFT's names of the two factors, below the name of their linear."""


@dataclass(frozen=True)
class AdapterSpec:
    """Size, scale and places of the adapters of a model.

    rank: r, of A [r, in] and B [out, r]. alpha, use_rslora: the scale is alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv
    2312.03732). targets: "all-linear", or names of linears; a name means every linear whose dotted name is it or ends
    with it after a dot, as in PEFT.

    Raises PolicyError for a rank or alpha that cannot be, and for no targets.
    """

    rank: int
    alpha: float
    targets: str | tuple[str, ...] = ALL_LINEAR
    use_rslora: bool = False

    def __post_init__(self) -> None:
        found = []
        if type(self.rank) is not int or not 1 <= self.rank <= MAX_RANK:
            found.append(
                Violation("adapter.rank", self.rank, "is not a rank", f"choose from 1 to {MAX_RANK}")
            )
        alpha = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            found.append(
                Violation("adapter.alpha", alpha, "is not a positive number", "give one, for example 16")
            )
        if type(self.use_rslora) is not bool:
            found.append(Violation("adapter.use_rslora", self.use_rslora, "is not a switch", "true or false"))
        if isinstance(self.targets, str):
            if self.targets != ALL_LINEAR:
                remedy = f"give {ALL_LINEAR!r}, or a list of names such as [q_proj, v_proj]"
                found.append(
                    Violation("adapter.targets", self.targets, "is one text but not 'all-linear'", remedy)
                )
        elif not self.targets or not all(isinstance(t, str) and t for t in self.targets):
            found.append(
                Violation("adapter.targets", self.targets, "names no linear", f"give {ALL_LINEAR!r}")
            )
        if found:
            raise PolicyError("adapter", found)
        object.__setattr__(self, "alpha", float(alpha))
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(sorted(set(self.targets))))

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` of it is equal to this."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AdapterSpec:
        """Raises PolicyError for unknown or missing keys and values that cannot be."""
        known = [f.name for f in dataclasses.fields(cls)]
        found = [
            Violation(f"adapter.{key}", data[key], f"unknown key{closest(str(key), known)}", "remove it")
            for key in data
            if key not in known
        ]
        found += [
            Violation(f"adapter.{key}", None, "missing", "give it")
            for key in ("rank", "alpha")
            if key not in data
        ]
        if found:
            raise PolicyError("adapter", found)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


def adapter_formats(policy: PrecisionPolicy) -> Adapters:
    """The policy's section `adapters`; where it is null, everything in compute_dtype."""
    return policy.adapters or formats_of(policy.compute_dtype)


def formats_of(compute_dtype: str) -> Adapters:
    """What `adapters: null` means under a compute dtype."""
    own: Any = FORMAT_OF_DTYPE[compute_dtype]
    return Adapters(
        weight=own,
        inner=own,
        dgrad=own,
        wgrad=own,
        saved=own,
        accumulation="fp32",
        addition="after_bias",
        gradient="fp32",
    )


def places(spec: AdapterSpec, linears: Sequence[ModuleSpec]) -> tuple[list[ModuleSpec], list[Violation]]:
    """The linears that have an adapter, and a violation for each target that there is not."""
    if spec.targets == ALL_LINEAR:
        return list(linears), []

    def meant(target: str) -> set[str]:
        return {n.name for n in linears if n.name == target or n.name.endswith(f".{target}")}

    names = {target: meant(target) for target in spec.targets}
    found = [linear for linear in linears if any(linear.name in of for of in names.values())]
    violations = []
    bare = sorted({linear.name.rsplit(".", 1)[-1] for linear in linears})
    for target, of in names.items():
        if not of:
            problem = f"is no projection of this model{closest(target.rsplit('.', 1)[-1], bare)}"
            remedy = f"{ALL_LINEAR!r}, or names out of {', '.join(bare)}"
            violations.append(Violation("adapter.targets", target, problem, remedy))
    return found, violations
