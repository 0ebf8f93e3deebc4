"""The operators that one forward of a `CausalLM` calls, in order, with the name of the module each belongs to.

A dispatched call knows tensors only. Its place in the model follows from its number in the forward, because the
order of calls is fixed by the architecture; `rllib_llm.mismatch.trace` refuses a forward that departs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from precision_kernels import Quantised, joinable
from precision_policies import Plan
from rllib_llm.models.architecture import Architecture

Arguments = tuple[Any, ...]
Tensors = Mapping[str, Tensor]

KINDS: dict[str, str] = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rms_norm_quantise": "norm",
    "add_rms_norm_quantise": "norm",
    "block_fp8_matmul": "linear",
    "invariant_matmul": "linear",
    "rotary": "rotary",
    "attention": "attention",
    "silu_mul": "silu_mul",
    "silu_mul_saving": "silu_mul",
    "silu_mul_quantise_both": "silu_mul",
    "token_logprobs": "log_probs",
}
"""Operator -> kind of step. Operators that are not listed prepare something (weights, codes, tables): their results
are compared where a listed operator reads them. Codes that a listed one returns are compared there, too."""

QUANTISERS = (
    "quantise_activation",
    "quantise_both",
    "rms_norm_quantise",
    "add_rms_norm_quantise",
    "silu_mul_quantise_both",
)
"""Operators that make the codes which an fp8 linear reads."""


def _codes(q: Quantised) -> dict[str, Tensor]:
    return {"scales": q.scales, "codes": q.codes}


_RESULTS: dict[str, Callable[[Any], Tensors]] = {
    "rms_norm": lambda r: {"": r[0]},
    "add_rms_norm": lambda r: {"residual": r[1], "normalised": r[0]},
    "rms_norm_quantise": lambda r: _codes(r[0]),
    "add_rms_norm_quantise": lambda r: {"residual": r[1], **_codes(r[0])},
    "block_fp8_matmul": lambda r: {"": r},
    "invariant_matmul": lambda r: {"": r},
    "rotary": lambda r: {"q": r[0], "k": r[1]},
    "attention": lambda r: {"": r[0]},
    "silu_mul": lambda r: {"": r},
    "silu_mul_saving": lambda r: {"": r[0]},
    "silu_mul_quantise_both": lambda r: _codes(r[0]),
    "token_logprobs": lambda r: {"": r[0]},
}

_SETTINGS: dict[str, Mapping[str, Callable[[Arguments], Any]]] = {
    "rms_norm": {"eps": lambda a: a[2]},
    "add_rms_norm": {"eps": lambda a: a[3]},
    "rms_norm_quantise": {"eps": lambda a: a[2]},
    "add_rms_norm_quantise": {"eps": lambda a: a[3]},
    "block_fp8_matmul": {"scale_format": lambda a: a[1].scale_format},
    "quantise_activation": {"scale_format": lambda a: a[0].scale_format},
    "token_logprobs": {"temperature": lambda a: float(a[2])},
}


def results(operator: str, result: Any) -> Tensors:
    """The tensors with one row per token that a call gives to later operators, by part ("" if there is one)."""
    return _RESULTS[operator](result)


def settings(operator: str, arguments: Arguments) -> dict[str, str]:
    """What besides tensors decides the result of a call, e.g. ``{"eps": "1e-06"}``.

    For a `Reading` the arguments are those of the call that reads it.
    """
    return {name: str(read(arguments)) for name, read in _SETTINGS.get(operator, {}).items()}


@dataclass(frozen=True)
class Reading:
    """Values that no listed operator returned, compared where one reads them.

    site: their name. operator: what made them. read: arguments of the reading call -> tensors by part.
    """

    site: str
    operator: str
    read: Callable[[Arguments], Tensors]


@dataclass(frozen=True)
class Step:
    """One listed operator call: the site it is compared as, its kind (a value of `KINDS`), what it reads.

    columns: sites and widths of a GEMM that serves several projections, one beside the other; empty for others.
    """

    site: str
    kind: str
    reads: tuple[Reading, ...] = ()
    columns: tuple[tuple[str, int], ...] = ()

    def split(self, tensors: Tensors) -> tuple[tuple[str, Tensors], ...]:
        """(site, its tensors) of what the call gave."""
        if not self.columns:
            return ((self.site, tensors),)
        parts = tensors[""].split([width for _, width in self.columns], 1)
        return tuple((site, {"": part}) for (site, _), part in zip(self.columns, parts, strict=True))


def body(architecture: Architecture, plan: Plan) -> tuple[Step, ...]:
    """Embedding to final norm, for every forward."""
    steps: list[Step] = []
    for index in range(architecture.layers):
        steps += _layer(index, architecture, plan)
    last = f"model.layers.{architecture.layers - 1}.mlp.down_proj"
    return (*steps, Step("model.norm", "norm", _bias(plan, last, 0)))


def head() -> tuple[Step, ...]:
    """Logits and log-probs of some rows."""
    return (Step("lm_head", "linear", (_input("lm_head"),)), Step("log_probs", "log_probs"))


def _layer(index: int, architecture: Architecture, plan: Plan) -> list[Step]:
    name = f"model.layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q, k, v = (f"{attention}.{x}_proj" for x in "qkv")
    if index == 0:
        entering: tuple[Reading, ...] = (Reading("model.embed_tokens", "embedding", lambda a: {"": a[0]}),)
        table: tuple[Reading, ...] = (Reading("rotary_table", "rotary_cos_sin", lambda a: {"": a[3][a[2]]}),)
    else:
        entering, table = _bias(plan, f"model.layers.{index - 1}.mlp.down_proj", 0), ()
    biases = _bias(plan, q, 0), _bias(plan, k, 1), _bias(plan, v, 2)
    steps = [
        Step(f"{name}.input_layernorm", "norm", entering),
        *_projections(plan, q, k, v),
    ]
    if architecture.qk_norm:
        steps += [
            Step(f"{attention}.q_norm", "norm", biases[0]),
            Step(f"{attention}.k_norm", "norm", _bias(plan, k, 0)),
            Step(f"{attention}.rotary", "rotary", table),
        ]
    else:
        steps += [Step(f"{attention}.rotary", "rotary", (*biases[0], *biases[1], *table))]
    return [
        *steps,
        Step(f"{attention}.attention", "attention", biases[2]),
        Step(f"{attention}.o_proj", "linear", (_input(f"{attention}.o_proj"),)),
        Step(f"{name}.post_attention_layernorm", "norm", _bias(plan, f"{attention}.o_proj", 0)),
        *_projections(plan, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        Step(
            f"{mlp}.silu_mul",
            "silu_mul",
            (*_bias(plan, f"{mlp}.gate_proj", 0), *_bias(plan, f"{mlp}.up_proj", 1)),
        ),
        Step(f"{mlp}.down_proj", "linear", (_input(f"{mlp}.down_proj"),)),
    ]


def _projections(plan: Plan, *modules: str) -> list[Step]:
    """Linears of one input: one call if their weights are joined (`JointProjections`), else one each."""
    first = Step(modules[0], "linear", (_input(modules[0]),))
    shapes = [plan[m].shape for m in modules]
    if joinable(shapes):
        columns = tuple((m, n) for m, (n, _) in zip(modules, shapes, strict=True))
        return [replace(first, columns=columns)]
    return [first, *(Step(m, "linear") for m in modules[1:])]


def _input(module: str) -> Reading:
    """The codes that an fp8 linear reads; nothing for another, whose input is an earlier result."""

    def read(arguments: Arguments) -> Tensors:
        x = arguments[0]
        return _codes(x) if isinstance(x, Quantised) else {}

    return Reading(f"{module}.input", "quantise_activation", read)


def _bias(plan: Plan, module: str, argument: int) -> tuple[Reading, ...]:
    """The output of a linear after its bias, as the next operator reads it; nothing for one without."""
    if not plan[module].bias:
        return ()
    return (Reading(f"{module}.bias", "bias", lambda a: {"": a[argument]}),)
