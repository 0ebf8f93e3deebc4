"""Policy x model -> plan: one row per module, the same on both sides, with one hash."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from . import models
from .adapters import A, AdapterSpec, B, adapter_formats, places
from .errors import PolicyError, Violation
from .exempt import resolve_patterns
from .hashing import canonical_hash
from .models import ModuleSpec
from .schema import BLOCK, FORMAT_OF_DTYPE, FORMAT_OF_MASTER

if TYPE_CHECKING:
    from .policy import PrecisionPolicy


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Formats of one module. Formats are "fp8" | "bf16" | "fp16" | "fp32"; scale_format matters where one is
    fp8.

    shape is (out, in) of linear, expert, router, lm_head and the factors of an adapter, (vocab, hidden) of an
    embedding, (dim,) of a norm; padded_shape is what the GEMM sees (zeros appended). exempt_reason says why a linear
    is not what `linear` says.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bias: bool
    train_forward: str
    rollout_forward: str
    dgrad: str
    wgrad: str
    saved: str
    scale_format: str
    padded_shape: tuple[int, ...]
    exempt_reason: str | None = None
    tied_to: str | None = None

    @property
    def uses_fp8(self) -> bool:
        """Whether any of its GEMMs or its saved input is fp8."""
        return "fp8" in (self.train_forward, self.rollout_forward, self.dgrad, self.wgrad, self.saved)


_COLUMNS = tuple(f.name for f in fields(ModulePlan))
_values = operator.attrgetter(*_COLUMNS)  # a row as a tuple, which JSON writes as a list


@dataclass(frozen=True)
class Plan:
    """The rows of all modules, sorted by name. `plan["model.norm"]` finds one."""

    policy_name: str
    policy_fingerprint: str
    model_type: str
    modules: tuple[ModulePlan, ...]
    adapter: AdapterSpec | None = None

    def __getitem__(self, name: str) -> ModulePlan:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no module '{name}' in the plan of {self.model_type}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[ModulePlan]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    @functools.cached_property
    def _by_name(self) -> dict[str, ModulePlan]:
        return {row.name: row for row in self.modules}

    @functools.cached_property
    def hash(self) -> str:
        """sha256 (hex) over all rows, and the adapters' rank and scale: equal plans, and only these, have equal
        hashes."""
        rows = [_values(row) for row in self.modules]
        if self.adapter is None:
            return canonical_hash(rows)
        return canonical_hash(
            {"modules": rows, "adapter": {"rank": self.adapter.rank, "scale": self.adapter.scale}}
        )

    @property
    def exempt(self) -> tuple[str, ...]:
        """Names of linear modules that are not fp8 although the policy's `linear` is."""
        return tuple(row.name for row in self.modules if row.exempt_reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` of it is equal to this plan."""
        head: dict[str, Any] = {
            "policy_name": self.policy_name,
            "policy_fingerprint": self.policy_fingerprint,
        }
        rows = [[list(v) if type(v) is tuple else v for v in _values(row)] for row in self.modules]
        if self.adapter is not None:
            head["adapter"] = self.adapter.to_dict()
        return {
            **head,
            "model_type": self.model_type,
            "hash": self.hash,
            "columns": list(_COLUMNS),
            "modules": rows,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """A plan from `to_dict`. Raises PolicyError if its rows do not have the hash that it states."""
        try:
            if tuple(data["columns"]) != _COLUMNS:
                raise ValueError(f"columns are {data['columns']}, expected {list(_COLUMNS)}")
            rows: list[list[Any]] = [
                [tuple(v) if isinstance(v, list) else v for v in row] for row in data["modules"]
            ]
            head = (data["policy_name"], data["policy_fingerprint"], data["model_type"])
            adapter = AdapterSpec.from_dict(data["adapter"]) if "adapter" in data else None
            plan = cls(*head, modules=tuple(ModulePlan(*row) for row in rows), adapter=adapter)
            stated, found = data["hash"], plan.hash
        except (KeyError, TypeError, ValueError) as error:
            violation = Violation(
                "plan", type(data).__name__, f"is not a plan: {error!r}", "give Plan.to_dict()"
            )
            raise PolicyError("plan", [violation]) from error
        if stated != found:
            problem = f"its rows have hash {found}"
            raise PolicyError(
                "plan", [Violation("hash", stated, problem, "the plan was changed; resolve again")]
            )
        return plan


def resolve(policy: PrecisionPolicy, model_config: Any, adapter: AdapterSpec | None = None) -> Plan:
    """The plan of `policy` on a model; see PrecisionPolicy.resolve."""
    config = models.config_dict(model_config)
    specs = models.modules_of(config)
    reasons, violations = _exemptions(policy, specs, models.num_layers(config))
    if models.is_tied(config):
        violations += _tied(policy)
    adapted: list[ModuleSpec] = []
    if adapter is not None:
        adapted, unknown = places(adapter, [spec for spec in specs if spec.kind == "linear"])
        violations += unknown
    if violations:
        raise PolicyError(f"policy '{policy.name}' on a {config['model_type']} model", violations)
    rows = _Rows(policy)
    modules = [rows.row(spec, reasons.get(spec.name)) for spec in specs]
    for spec in adapted:
        assert adapter is not None  # there are places for it
        modules += rows.adapter(spec, adapter.rank)
    modules.sort(key=operator.attrgetter("name"))
    return Plan(policy.name, policy.fingerprint, config["model_type"], tuple(modules), adapter)


class _Rows:
    """Turns specs into rows; the formats of each kind are looked up once."""

    def __init__(self, policy: PrecisionPolicy):
        p, own = policy, FORMAT_OF_DTYPE[policy.compute_dtype]
        linear = (
            p.linear.train_forward,
            p.linear.rollout_forward,
            p.linear.dgrad,
            p.linear.wgrad,
            p.linear.saved,
        )
        head = p.lm_head
        self.exempt = (own,) * 5
        self.scale_format = p.scale_format
        self.adapters = adapter_formats(p)
        self.formats = {
            "linear": linear,
            "expert": linear,
            "lm_head": (head.train_forward, head.rollout_forward, head.dgrad, head.wgrad, head.saved),
            "embedding": (
                p.embedding.train_forward,
                p.embedding.rollout_forward,
                own,
                FORMAT_OF_MASTER[p.master_dtype],
                own,
            ),
            "norm": (p.norm.train_forward, p.norm.rollout_forward, own, p.norm.statistics, p.norm.saved),
            "router": (p.router.train_forward, p.router.rollout_forward, *(p.router.train_forward,) * 3),
        }

    def row(self, spec: ModuleSpec, reason: str | None) -> ModulePlan:
        formats = self.exempt if reason else self.formats[spec.kind]
        padded = tuple(_ceil(n) for n in spec.shape) if "fp8" in formats else spec.shape
        name, kind, shape, bias = spec[:4]
        return ModulePlan(name, kind, shape, bias, *formats, self.scale_format, padded, reason, spec.tied_to)

    def adapter(self, spec: ModuleSpec, rank: int) -> list[ModulePlan]:
        """The rows of A [rank, in] and B [out, rank] of a linear."""
        a = self.adapters
        formats = (a.weight, a.weight, a.dgrad, a.wgrad, a.saved)
        shapes = {A: (rank, spec.shape[1]), B: (spec.shape[0], rank)}
        return [
            ModulePlan(f"{spec.name}.{factor}", "adapter", shape, False, *formats, self.scale_format, shape)
            for factor, shape in shapes.items()
        ]


def _ceil(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def _exemptions(
    policy: PrecisionPolicy, specs: Sequence[ModuleSpec], layers: int
) -> tuple[dict[str, str], list[Violation]]:
    """name -> reason for every linear that stays in compute_dtype, and what cannot be."""
    if not policy.uses_fp8:
        return {}, []
    linears = [spec for spec in specs if spec.kind in ("linear", "expert")]
    matched, violations = resolve_patterns(policy.exempt.modules, (spec.name for spec in linears))
    reasons = {name: f"exempt.modules: '{pattern}'" for name, pattern in matched.items()}
    first, last = policy.exempt.first_layers, policy.exempt.last_layers
    if first or last:
        for spec in linears:
            if spec.layer is not None and spec.layer < first:
                reasons.setdefault(spec.name, f"exempt.first_layers: {first}")
            if spec.layer is not None and spec.layer >= layers - last:
                reasons.setdefault(spec.name, f"exempt.last_layers: {last}")
    violations += _split_groups(linears, reasons)
    if policy.ragged != "pad":
        violations += _ragged(policy.ragged, linears, reasons)
    return reasons, violations


def _split_groups(linears: Sequence[ModuleSpec], reasons: dict[str, str]) -> Iterator[Violation]:
    if not reasons:
        return
    groups: dict[str, list[str]] = {}
    for spec in linears:
        if spec.fused:
            groups.setdefault(spec.fused, []).append(spec.name)
    for fused, members in groups.items():
        inside = [name for name in members if name in reasons]
        if inside and len(inside) < len(members):
            left = [
                name.rsplit(".", 1)[-1] if len(members) < 8 else name
                for name in members
                if name not in reasons
            ]
            shown = ", ".join(left[:4]) + (", …" if len(left) > 4 else "")
            problem = (
                f"exempts {len(inside)} of {len(members)} modules that engines compute as one GEMM ({fused})"
            )
            yield Violation("exempt", inside[0], problem, f"exempt {shown} too, or none of them")


def _ragged(mode: str, linears: Sequence[ModuleSpec], reasons: dict[str, str]) -> list[Violation]:
    """Fills `reasons` for ragged modules and those fused with them (exempt), or lists them (refuse)."""
    ragged = {s.name: s for s in linears if s.name not in reasons and any(n % BLOCK for n in s.shape)}
    if mode == "refuse":
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, spec in ragged.items():
            by_shape.setdefault(spec.shape, []).append(name)
        remedy = "ragged: pad or ragged: exempt, or name the modules in exempt.modules"
        return [
            Violation(
                "ragged", "refuse", f"{len(n)} modules of shape {shape} (first: {n[0]}) need padding", remedy
            )
            for shape, n in sorted(by_shape.items())
        ]
    cause = {spec.fused: name for name, spec in reversed(ragged.items()) if spec.fused}
    for spec in linears:
        if spec.name in ragged:
            reasons[spec.name] = f"ragged: exempt, {spec.shape} is not a multiple of {BLOCK}"
        elif spec.fused in cause and spec.name not in reasons:
            reasons[spec.name] = f"ragged: exempt, computed in one GEMM with {cause[spec.fused]}"
    return []


def _tied(policy: PrecisionPolicy) -> list[Violation]:
    found = []
    for key in ("train_forward", "rollout_forward"):
        head, table = getattr(policy.lm_head, key), getattr(policy.embedding, key)
        if head != table:
            problem = f"the model ties lm_head to the embedding, which is {table}"
            found.append(Violation(f"lm_head.{key}", head, problem, f"use {table} for this model"))
    return found
