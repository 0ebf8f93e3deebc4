"""Which operator makes the difference? Two traces compared operator by operator, in the order of computation.

Every value that passes from one operator to the next is compared, so the first that differs was computed from equal
inputs: the operator that made it is where the sides part, and everything after it inherits the difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from precision_policies import load_policy
from rllib_llm.engines import EngineUnavailableError, SamplingParams, make_engine
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.mismatch.trace import Site, Trace
from rllib_llm.mismatch.workload import ENGINE_SITE, Token, Workload, trace_learner, trace_rollout
from rllib_llm.models import load_pretrained

TRAINING = "training"
"""Sites below it are a training step's; what they are compared with is the learner's own score."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class OperatorComparison:
    """One tensor of one site on both sides, over the tokens that both computed.

    site: module, plus ".input" (codes and scales it reads), ".bias" (its output after the bias) or the operator.
    part: which tensor of several ("residual", "codes", "q", ...), else "". operator: the learner's; rollout_operator:
    the rollout's. dtype: that of the tensor; float32 and both names if the sides have different ones. max_ulps:
    largest distance in representable numbers of that dtype, see `ulps`. max_abs: largest |learner - rollout|, inf if
    one side is not finite. first, worst: first token with a difference, and the first that holds max_ulps; None if all
    are equal.
    """

    site: str
    part: str
    operator: str
    rollout_operator: str
    dtype: str
    elements: int
    differing: int
    tokens: int
    differing_tokens: int
    max_ulps: int
    max_abs: float
    first: Token | None
    worst: Token | None

    @property
    def equal(self) -> bool:
        return self.differing == 0

    @property
    def name(self) -> str:
        """``site``, or ``site[part]``."""
        return f"{self.site}[{self.part}]" if self.part else self.site


@dataclass(frozen=True)
class Localisation:
    """Comparisons in the order of computation; `evidence` says what is known about the first that differs."""

    comparisons: tuple[OperatorComparison, ...]
    evidence: tuple[str, ...] = ()
    one_side_only: tuple[str, ...] = ()

    @property
    def first(self) -> OperatorComparison | None:
        """The first comparison that is not equal: where the sides part."""
        return next((c for c in self.comparisons if not c.equal), None)

    @property
    def equal(self) -> bool:
        return self.first is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that JSON does not have (inf) are None."""

        def row(c: OperatorComparison) -> dict[str, Any]:
            return asdict(c) | {"max_abs": c.max_abs if math.isfinite(c.max_abs) else None}

        return {
            "equal": self.equal,
            "first": None if self.first is None else row(self.first),
            "evidence": list(self.evidence),
            "one_side_only": list(self.one_side_only),
            "operators": [row(c) for c in self.comparisons],
        }


def localise(
    model: Any,
    policy: Any,
    prompts: Sequence[Sequence[int]],
    *,
    engine: str = "torch",
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Localisation, Workload]:
    """Samples with the engine, replays on its model and on the learner's, compares every operator.

    What the learner's training steps compute in other operators follows (`with_training`).

    Args:
        model: directory or shipped name. policy: whatever `load_policy` takes.
        prompts: token ids. max_new_tokens: 0 compares the prompts' prefill only.
        engine: "torch"; the two models are in memory one after the other.

    Raises:
        EngineUnavailableError: an engine whose model runs in another process.
        PolicyError, ModelPathError, CheckpointError, ArchitectureError, PromptError: bad input.
    """
    policy = load_policy(policy)
    require_traceable(engine)
    with closing(make_engine(engine, model, policy, device=device)) as rollout:
        assert isinstance(rollout, TorchEngine)
        if max_new_tokens:
            params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
            workload = Workload.sampled(rollout, prompts, params)
        else:
            workload = Workload.prompts_only(prompts)
        theirs = trace_rollout(rollout.model, workload, max_prefill_tokens=rollout.max_prefill_tokens)
    learner = load_pretrained(model, policy, "train").to(device)
    ours = trace_learner(learner, workload)
    found = compare_traces(ours, theirs, workload)
    return with_training(found, trace_learner(learner, workload, training=True), ours, workload), workload


def require_traceable(engine: str) -> None:
    """Raises EngineUnavailableError for an engine whose operators run where they cannot be traced."""
    if engine != "torch":
        raise EngineUnavailableError(
            f"mismatch localise: engine {engine!r} runs the model in a process of its own, with attention on its "
            "pages, where operators cannot be traced. Use engine='torch', which calls the same operators, to check "
            "model, policy and weights; benchmarks/on_policy.py compares vLLM's log-probs with the learner's"
        )


def compare_traces(learner: Trace, rollout: Trace, workload: Workload) -> Localisation:
    """Compares everything that both sides computed, in the learner's order.

    Raises ValueError when a tensor has another width on the other side, or nothing is comparable.
    """
    comparisons: list[OperatorComparison] = []
    one_sided = [name for name in rollout.sites if name not in learner.sites]
    for name, ours in learner.sites.items():
        theirs = rollout.sites.get(name)
        if theirs is None:
            one_sided.append(name)
            continue
        for part in ours.parts:
            if part in theirs.parts:
                comparisons.append(_compare(name, part, ours, theirs, workload))
            else:
                one_sided.append(f"{name}[{part}]")
    if not comparisons:
        raise ValueError("compare_traces: the two traces have no operator in common")
    found = Localisation(tuple(comparisons), (), tuple(one_sided))
    if found.first is None:
        return found
    return Localisation(
        found.comparisons, tuple(_evidence(found.first.site, learner, rollout)), found.one_side_only
    )


def with_training(found: Localisation, training: Trace, learner: Trace, workload: Workload) -> Localisation:
    """``found`` and, behind it, a training step's forward against the learner's scores, at sites "training.…".

    With gradients, norms and SiLU hand over codes, and other operators make them (`coded` and `feed_forward` of
    `precision_kernels.autograd`). ``training``, ``learner``: `trace_learner` of one model, with and without.
    """
    inner = compare_traces(training, learner, workload)
    rows = tuple(replace(c, site=f"{TRAINING}.{c.site}") for c in inner.comparisons)
    evidence = found.evidence
    if found.equal and inner.first is not None:
        step, score = training.sites[inner.first.site], learner.sites[inner.first.site]
        evidence = (
            "the learner scores as the rollout does, but its training step does not give these scores: made by "
            f"{step.implementation or step.operator} there, by {score.implementation or score.operator} in the scores",
        )
    return Localisation(found.comparisons + rows, evidence, found.one_side_only)


def _compare(name: str, part: str, ours: Site, theirs: Site, workload: Workload) -> OperatorComparison:
    our_rows, a = ours.values(part)
    their_rows, b = theirs.values(part)
    rows = our_rows[torch.isin(our_rows, their_rows)]
    a, b = a[torch.isin(our_rows, rows)], b[torch.isin(their_rows, rows)]
    if a.shape != b.shape:
        raise ValueError(
            f"{name}: the learner computes {tuple(a.shape)} and the rollout {tuple(b.shape)} for the same tokens; both "
            "sides must run one model"
        )
    dtype = str(a.dtype).removeprefix("torch.")
    if a.dtype != b.dtype:
        dtype = f"float32 (learner {dtype}, rollout {str(b.dtype).removeprefix('torch.')})"
        a, b = a.float(), b.float()
    distance = ulps(a, b).flatten(1) if a.ndim > 1 else ulps(a, b)[:, None]
    worst = distance.amax(1) if distance.numel() else distance.new_zeros(len(rows))
    bad = worst.nonzero().flatten()
    return OperatorComparison(
        site=name,
        part=part,
        operator=ours.operator,
        rollout_operator=theirs.operator,
        dtype=dtype,
        elements=a.numel(),
        differing=int((distance > 0).sum()),
        tokens=len(rows),
        differing_tokens=len(bad),
        max_ulps=int(worst.max()) if len(rows) else 0,
        max_abs=_max_abs(a, b, distance),
        first=workload.token(int(rows[bad[0]])) if len(bad) else None,
        worst=workload.token(int(rows[worst.argmax()])) if len(bad) else None,
    )


def _max_abs(a: Tensor, b: Tensor, distance: Tensor) -> float:
    differs = (distance > 0).flatten()
    if not bool(differs.any()):
        return 0.0
    gap = (a.double().flatten()[differs] - b.double().flatten()[differs]).abs()
    return float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max())


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """int64, how many representable numbers lie between a and b, element by element: 0 equal, 1 neighbours.

    a, b: one shape, one dtype of float32, bfloat16, float16, float8_e4m3fn. -0 equals 0. All NaN are one value, one
    beyond the largest bit pattern of a number.
    """
    return (_ordered(a) - _ordered(b)).abs()


def _ordered(x: Tensor) -> Tensor:
    """int64 in the order of the numbers: bits of the magnitude, with the number's sign."""
    bits = x.contiguous().view(_BITS[x.dtype.itemsize])
    largest = torch.iinfo(bits.dtype).max
    magnitude = bits.to(torch.int64) & largest
    ordered = torch.where(bits < 0, -magnitude, magnitude)
    return torch.where(x.float().isnan(), torch.full_like(ordered, largest), ordered)


_REMARKS = {
    ENGINE_SITE: "the replay of prefill and decode agrees with the learner, what the engine reported while sampling "
    "does not: look at its sampler (temperature, truncation), its scheduling, and the version of its weights",
    "rotary_table": "the sides look up other positions, or made the table from other rope parameters or frequencies",
}

# ---- why -------------------------------------------------------------------------------------------------------------


def _evidence(name: str, learner: Trace, rollout: Trace) -> list[str]:
    """What the traces know about a site that differs though its inputs are equal."""
    ours, theirs = learner.sites[name], rollout.sites[name]
    if name in _REMARKS:
        return [_REMARKS[name]]
    module = name.removesuffix(".input").removesuffix(".bias")
    found = _other_formats(module, learner, rollout)
    if ours.implementation != theirs.implementation and ours.operator == theirs.operator:
        found.append(f"implementation: learner {ours.implementation}, rollout {theirs.implementation}")
    for key in sorted(ours.settings.keys() & theirs.settings.keys()):
        if ours.settings[key] != theirs.settings[key]:
            found.append(f"{key}: learner {ours.settings[key]}, rollout {theirs.settings[key]}")
    if not name.endswith(".input"):
        found += _other_weights(module, learner, rollout)
    if found:
        return found
    same = "format, settings, implementation and weights" if ours.implementation else "format and weights"
    return [
        f"{same} are the same on both sides, so the result of a row depends on the other rows of the call, on its "
        f"place, or on state such as the KV cache; learner: {_calls(ours)}, rollout: {_calls(theirs)}"
    ]


def _other_formats(module: str, learner: Trace, rollout: Trace) -> list[str]:
    ours, theirs = learner.formats.get(module), rollout.formats.get(module)
    return [] if ours == theirs else [f"format of the forward: learner {ours}, rollout {theirs}"]


def _other_weights(module: str, learner: Trace, rollout: Trace) -> list[str]:
    owned = [n for n in learner.weights if n.startswith(f"{module}.")]
    if not owned and module == "lm_head":  # tied
        owned = [n for n in learner.weights if n.startswith("model.embed_tokens.")]
    differing = [n for n in owned if rollout.weights.get(n) != learner.weights[n]]
    if not differing:
        return []
    return [f"weights: the rollout holds other bytes than the learner exports for {', '.join(differing)}"]


def _calls(site: Site) -> str:
    counts = Counter(site.row_counts)
    total, sizes = sum(counts.values()), sorted(counts)
    rows = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{total} call{'s' * (total > 1)} of {rows} row{'s' * (sizes[-1] > 1)}"
