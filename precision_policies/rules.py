"""Combinations that cannot be, and what follows from a policy as a whole (is it on-policy by construction?).

A rule names the top-level keys that it reads; where one of these is itself malformed the rule is skipped, so
that one message can list malformed values and impossible combinations together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from .corrections import bound_violations
from .errors import Violation
from .schema import FORMAT_OF_DTYPE

Rule = Callable[[Any], Iterator[Violation]]
_RULES: list[tuple[frozenset[str], Rule]] = []
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check(tree: Any, broken: Collection[str] = ()) -> list[Violation]:
    """Violations of every rule whose keys are well-formed; `tree` has the policy's top-level attributes."""
    return [v for needs, rule in _RULES if needs.isdisjoint(broken) for v in rule(tree)]


def _rule(*needs: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((frozenset(needs), rule))
        return rule

    return register


FORWARD_CLASSES = ("linear", "lm_head", "embedding", "norm", "attention", "activation", "router")
ON_POLICY_KEYS = (*FORWARD_CLASSES, "operators", "operator_overrides")


def on_policy_obstacles(tree: Any) -> list[str]:
    """Reasons why the two sides do not compute one distribution by construction; empty if they do.

    Equal formats are not enough: with the same FP8 scheme but other operators, 0 % of the log-probs were
    bit-equal on an H200 (mean |difference| 0.52), with the same operators 100 % were.
    """
    reasons = []
    for name in FORWARD_CLASSES:
        part = getattr(tree, name)
        if part.train_forward != part.rollout_forward:
            reasons.append(f"{name}: {part.train_forward} in training, {part.rollout_forward} in rollout")
    if tree.operators != "shared":
        reasons.append(
            f"operators: {tree.operators} (same formats, but each side has its own implementation)"
        )
    reasons += [
        f"operator_overrides: {op} may differ ({why})" for op, why in sorted(tree.operator_overrides.items())
    ]
    return reasons


@_rule("name")
def _name(t: Any) -> Iterator[Violation]:
    if not _NAME.fullmatch(t.name):
        yield Violation(
            "name", t.name, "is not a usable name", "1 to 64 of A-Z a-z 0-9 . _ - and a letter or digit first"
        )


@_rule("linear", "compute_dtype")
def _linear_formats(t: Any) -> Iterator[Violation]:
    own = FORMAT_OF_DTYPE[t.compute_dtype]
    allowed = {
        **dict.fromkeys(("train_forward", "rollout_forward", "saved"), ("fp8", own)),
        **dict.fromkeys(("dgrad", "wgrad"), tuple(dict.fromkeys(("fp8", "fp16", "bf16", own)))),
    }
    for key, options in allowed.items():
        value = getattr(t.linear, key)
        if value not in options:
            problem = f"has no GEMM under compute_dtype {t.compute_dtype}"
            yield Violation(
                f"linear.{key}", value, problem, f"use {' or '.join(options)}, or change compute_dtype"
            )
    if t.linear.train_forward != "fp8":
        for key in ("dgrad", "wgrad", "saved"):
            if getattr(t.linear, key) == "fp8":
                problem = (
                    f"needs fp8 operands, but linear.train_forward = {t.linear.train_forward!r} makes none"
                )
                yield Violation(
                    f"linear.{key}", "fp8", problem, f"use {own}, or set linear.train_forward: fp8"
                )


@_rule("compute_dtype", "gradient_dtype", *FORWARD_CLASSES[1:])
def _plain_formats(t: Any) -> Iterator[Violation]:
    own = FORMAT_OF_DTYPE[t.compute_dtype]
    if t.gradient_dtype != t.compute_dtype:
        problem = f"differs from compute_dtype {t.compute_dtype}, the dtype of the activations they belong to"
        yield Violation("gradient_dtype", t.gradient_dtype, problem, f"use {t.compute_dtype}")
    more = {"lm_head": ("fp32",), "router": ("fp32",)}
    for name in FORWARD_CLASSES[1:]:
        for key, value in vars(getattr(t, name)).items():
            if value not in FORMAT_OF_DTYPE.values() and value != "fp8":
                continue
            if key in ("accumulation", "softmax", "statistics", "internal"):
                continue
            options = (
                own,
                *more.get(name, ()),
                *(("fp8",) if (name, key) == ("activation", "saved") else ()),
            )
            if value not in options:
                problem = f"does not go with compute_dtype {t.compute_dtype}"
                remedy = f"use {' or '.join(dict.fromkeys(options))}"
                yield Violation(f"{name}.{key}", value, problem, remedy)


@_rule("adapters", "compute_dtype")
def _adapter_formats(t: Any) -> Iterator[Violation]:
    own = FORMAT_OF_DTYPE[t.compute_dtype]
    for key in ("weight", "inner", "dgrad", "wgrad", "saved") if t.adapters is not None else ():
        if (value := getattr(t.adapters, key)) not in (own, "fp32"):
            problem = f"does not go with compute_dtype {t.compute_dtype}"
            remedy = f"use {' or '.join(dict.fromkeys((own, 'fp32')))}, or adapters: null"
            yield Violation(f"adapters.{key}", value, problem, remedy)


@_rule("master_dtype", "compute_dtype")
def _split_masters(t: Any) -> Iterator[Violation]:
    if t.master_dtype == "split_float32" and t.compute_dtype != "bfloat16":
        problem = f"computes with the masters' bfloat16 half, but compute_dtype is {t.compute_dtype}"
        yield Violation("master_dtype", t.master_dtype, problem, "use float32, or compute_dtype: bfloat16")


@_rule("kv_cache", "attention")
def _kv_cache(t: Any) -> Iterator[Violation]:
    if t.kv_cache.format != t.attention.rollout_forward:
        problem = f"the learner attends over uncached K and V in {t.attention.rollout_forward}"
        yield Violation("kv_cache.format", t.kv_cache.format, problem, f"use {t.attention.rollout_forward}")


@_rule("quantisation")
def _ue8m0_floor(t: Any) -> Iterator[Violation]:
    floor = t.quantisation.scale_floor
    if t.quantisation.scale_format == "ue8m0" and math.frexp(floor)[0] != 0.5:
        near = 2.0 ** round(math.log2(floor))
        yield Violation(
            "quantisation.scale_floor", floor, "is not a power of two, which ue8m0 needs", f"use {near!r}"
        )


@_rule("compute_dtype", "linear", "loss_scaling")
def _loss_scaling(t: Any) -> Iterator[Violation]:
    where = [f"linear.{key}" for key in ("dgrad", "wgrad") if getattr(t.linear, key) == "fp16"]
    where = ["compute_dtype", *where] if t.compute_dtype == "float16" else where
    if where and t.loss_scaling is None:
        problem = f"{' and '.join(where)} put gradients into fp16, where those below 6e-8 vanish"
        yield Violation(
            "loss_scaling", None, problem, "give loss_scaling: {initial: 65536.0, growth_interval: 1000}"
        )


@_rule("compute_dtype", "linear")
def _overflow_is_seen(t: Any) -> Iterator[Violation]:
    # An fp8 dgrad saturates as well, but a weight gradient of another format shows the infinity.
    where = [] if t.compute_dtype != "float16" else ["compute_dtype float16"]
    where += [] if t.linear.dgrad != "fp16" else ["linear.dgrad fp16"]
    if where and t.linear.wgrad == "fp8":
        problem = (
            f"with {' and '.join(where)} gradients may overflow; fp8 saturates infinities, "
            "so no gradient would show it, and loss_scaling would keep its scale"
        )
        remedy = "use fp16, bf16 or fp32, or compute_dtype bfloat16 and dgrad fp8 or bf16"
        yield Violation("linear.wgrad", "fp8", problem, remedy)


@_rule("correction")
def _correction_bounds(t: Any) -> Iterator[Violation]:
    c = t.correction
    yield from bound_violations(c)
    if c.kind == "none" and c.veto is not None:
        yield Violation("correction.veto", c.veto, "there is no correction to veto in", "set it to null")


@_rule("correction", *ON_POLICY_KEYS)
def _correction_said(t: Any) -> Iterator[Violation]:
    obstacles = on_policy_obstacles(t)
    if obstacles and t.correction.kind == "none" and not t.correction.accept_uncorrected:
        problem = f"samples are off-policy ({'; '.join(obstacles)}) and nothing corrects for it"
        remedy = "choose one (e.g. kind: tis_token, upper: 2.0), or say correction.accept_uncorrected: true"
        yield Violation("correction.kind", "none", problem, remedy)


@_rule("correction", "guard")
def _correct_when(t: Any) -> Iterator[Violation]:
    c, g = t.correction, t.guard
    if g.action == "correct" and (c.kind == "none" or c.when != "guard"):
        problem = "the guard has no correction to switch on"
        yield Violation("guard.action", "correct", problem, "give correction.kind and correction.when: guard")
    if c.when == "guard" and g.action != "correct":
        problem = f"waits for the guard, whose action is {g.action}"
        yield Violation("correction.when", "guard", problem, "use when: always, or guard.action: correct")


@_rule("guard", *ON_POLICY_KEYS)
def _guard_reachable(t: Any) -> Iterator[Violation]:
    g = t.guard
    if g.metric == "bit_equal_share" and g.tolerance > 1.0:
        yield Violation(
            "guard.tolerance", g.tolerance, "a share of tokens is at most 1", "choose from 0 to 1"
        )
    obstacles = on_policy_obstacles(t)
    if g.action == "halt" and g.tolerance == 0.0 and obstacles:
        problem = f"stops the run at once: the sides differ by construction ({'; '.join(obstacles)})"
        yield Violation(
            "guard.tolerance", g.tolerance, problem, "allow a positive tolerance, or action: warn"
        )


@_rule("operators", "operator_overrides")
def _overrides(t: Any) -> Iterator[Violation]:
    if t.operator_overrides and t.operators == "scheme":
        problem = "operators: scheme compares no operators, so there is nothing to override"
        yield Violation(
            "operator_overrides", dict(t.operator_overrides), problem, "remove it, or operators: shared"
        )
    for op, why in t.operator_overrides.items():
        if not why.strip():
            yield Violation(
                f"operator_overrides.{op}", why, "an override needs a reason", "say in a sentence why"
            )
