"""The bisecting tool on sides that differ: a planted difference is named where it is, with its cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from precision_kernels import Implementation, Quantised, bind, reference
from precision_kernels.dispatch import table
from rllib_llm.mismatch.localise import compare_traces
from rllib_llm.mismatch.program import KINDS, Step, body, head
from rllib_llm.mismatch.trace import Recorder, TraceError
from rllib_llm.mismatch.workload import ENGINE_SITE, Token, Workload, trace_learner, trace_rollout
from rllib_llm.models import PackedBatch
from tests.mismatch.localise_cases import bound, compared, make_pair, sampled
from tests.models.cases import random_sequences


class OneElement:
    """Implementations of all traced operators; the `target`-th call changes one element of its first output."""

    def __init__(self, target: int, row: int, steps: int) -> None:
        self.target, self.row, self.steps, self.calls, self.place = target, row, steps, 0, -1

    def of(self, operator: str) -> Callable[..., Any]:
        function = getattr(reference, operator)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            self.calls += 1
            if self.calls - 1 == self.target:
                self.change(result[0] if isinstance(result, tuple) else result)
            return result

        return call

    def change(self, tensor: torch.Tensor) -> None:
        values = tensor.view(len(tensor), -1)[self.row]
        # away from zero, where a step is one ulp of this binade
        self.place = int(values.float().abs().argmax())
        bits = values.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        bits[self.place] -= self.steps

    def __enter__(self) -> OneElement:
        self.before = {operator: table("cpu")[operator] for operator in KINDS}
        for operator in KINDS:
            bind(operator, "cpu", Implementation(f"tests.{operator}", "1", self.of(operator)))
        return self

    def __exit__(self, *_: object) -> None:
        for operator, implementation in self.before.items():
            bind(operator, "cpu", implementation)


def site_of_column(step: Step, column: int) -> str:
    """Where an element of a call's first output belongs: one GEMM may serve several projections."""
    for site, width in step.columns:
        if column < width:
            return site
        column -= width
    return step.site


@pytest.mark.parametrize(("kind", "policy"), [("qwen3", "unified-fp8"), ("qwen2", "bf16")])
def test_one_changed_element_is_found_after_every_operator(kind: str, policy: str) -> None:
    """For each operator of the program in turn, one element off by 1 or 2 ulp in one token of the rollout: that site
    is named, with one element, that distance, and that token."""
    model, engine = make_pair(kind, policy)
    workload = Workload.prompts_only(random_sequences((4, 9), 128))
    learner = trace_learner(model, workload)
    program = [*body(model.architecture, model.plan), *head()]
    for index, step in enumerate(program):
        steps, row = 1 + index % 2, 6
        with OneElement(index, row, steps) as planted:
            rollout = trace_rollout(engine.model, workload)
        assert planted.calls == len(program)
        first = compare_traces(learner, rollout, workload).first
        assert first is not None, step.site
        scored_row = int(workload.scored[row]) if step.site in ("lm_head", "log_probs") else row
        site = site_of_column(step, planted.place)
        assert (first.site, first.differing, first.max_ulps) == (site, 1, steps)
        assert first.first == first.worst == workload.token(scored_row)
        assert first.max_abs > 0


def other_eps(engine: Any) -> Any:
    engine.model.model.layers[1].input_layernorm.eps = 1e-3
    return None


def stale_weight(engine: Any) -> Any:
    engine.model.model.layers[1].mlp.up_proj.weight.view(torch.uint8)[3, 5] ^= 8
    engine.model.forget_operands()
    return None


def stale_bias(engine: Any) -> Any:
    engine.model.model.layers[0].self_attn.k_proj.bias += 0.5
    return None


def stale_embedding(engine: Any) -> Any:
    engine.model.model.embed_tokens.weight += 0.5
    return None


def stale_head(engine: Any) -> Any:
    engine.model.lm_head.weight[7] += 0.5
    return None


def other_rope_theta(engine: Any) -> Any:
    rotation = engine.model._rotation
    rotation._inverse, rotation._table = rotation._inverse * 1.01, None
    return None


def fp8_keys_and_values(engine: Any) -> Any:
    def attention(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return reference.attention(q, k, v, *rest)

    return bound("attention", attention)


def other_quantiser(engine: Any) -> Any:
    def quantise_activation(x: Any, *rest: Any) -> Any:
        q = reference.quantise_activation(x, *rest)
        scales = torch.nextafter(q.scales, torch.zeros_like(q.scales))
        return Quantised(q.codes, scales, q.kind, q.scale_format)

    return bound("quantise_activation", quantise_activation)


@pytest.mark.parametrize(
    ("kind", "plant", "site", "part", "evidence"),
    [
        ("qwen3", other_eps, "model.layers.1.input_layernorm", "normalised", r"eps: learner 1e-06, rollout 0\.001"),
        ("qwen3", stale_weight, "model.layers.1.mlp.up_proj", "", r"other bytes .*\.1\.mlp\.up_proj\.weight$"),
        ("qwen2", stale_bias, "model.layers.0.self_attn.k_proj.bias", "", r"other bytes .*\.k_proj\.bias$"),
        ("qwen2", stale_embedding, "model.embed_tokens", "", r"other bytes .* model\.embed_tokens\.weight$"),
        ("llama", stale_head, "lm_head", "", r"other bytes .* lm_head\.weight$"),
        ("llama", other_rope_theta, "rotary_table", "", r"other rope parameters"),
        ("llama", fp8_keys_and_values, "model.layers.0.self_attn.attention", "", r"rollout tests\.attention@1"),
        ("qwen3", other_quantiser, "model.layers.0.self_attn.q_proj.input", "scales", r"rollout tests\.quantise_act"),
    ],
)  # fmt: skip
def test_a_planted_difference_is_named_with_its_cause(
    kind: str, plant: Callable[[Any], Any], site: str, part: str, evidence: str
) -> None:
    """Another eps, a stale weight, bias, embedding or head, another rotary table, an fp8 KV cache, another quantiser on
    the rollout side: the site is named and the evidence says what the sides do not share."""
    model, engine = make_pair(kind, "unified-fp8")
    workload = sampled(engine, 3)
    learner = trace_learner(model, workload)
    phase = plant(engine)
    if phase is None:
        rollout = trace_rollout(engine.model, workload)
    else:
        with phase:
            rollout = trace_rollout(engine.model, workload)
    found = compare_traces(learner, rollout, workload)
    assert found.first is not None
    assert (found.first.site, found.first.part) == (site, part)
    assert any(re.search(evidence, line) for line in found.evidence), found.evidence


def test_a_norm_that_depends_on_the_batch_is_named() -> None:
    """The same implementation on both sides, which gives other bits for 16 rows or more (as vLLM 0.26's norm does for
    256): the first norm is named for the tokens decoded, and the evidence says that a row's
    result depends on its call."""
    model, engine = make_pair("qwen3", "bf16")
    workload = sampled(engine, 4)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        y, rstd = reference.rms_norm(x, weight, eps)
        if x.ndim == 2 and len(x) >= 16:
            y = y * torch.tensor(1.0078125, dtype=y.dtype)  # the next bf16 after 1
        return y, rstd

    with bound("rms_norm", rms_norm):
        found = compared(model, engine, workload)
    first = found.first
    assert first is not None
    assert first.site == "model.layers.0.input_layernorm"
    assert first.first == Token(0, 1, "answer")  # prompts are prefilled in one call of 23 rows
    assert first.differing_tokens == sum(len(s.answer) - 1 for s in workload.samples)
    assert "depends on the other rows of the call" in found.evidence[0]
    assert "learner: 1 call of" in found.evidence[0]


def test_what_the_engine_reported_is_compared_too() -> None:
    """A reported log-prob off by one ulp, with all operators equal: the engine is named, at the token before the one
    that it belongs to."""
    model, engine = make_pair("qwen3", "unified-fp8")
    workload = sampled(engine)
    sample = workload.samples[1]
    reported = sample.reported.copy()
    reported[2] = np.nextafter(reported[2], np.float32(-100))
    changed = replace(
        workload, samples=(workload.samples[0], replace(sample, reported=reported), workload.samples[2])
    )
    found = compared(model, engine, changed)
    first = found.first
    assert first is not None
    assert (first.site, first.differing, first.max_ulps) == (ENGINE_SITE, 1, 1)
    assert first.first == Token(1, len(sample.prompt) + 1, "answer")
    assert "sampler" in found.evidence[0]


def test_the_mixed_policy_differs_from_the_first_linear_on() -> None:
    """BF16 training and FP8 rollout: q_proj of layer 0 is named, with both operators and both formats."""
    model, engine = make_pair("qwen3", "mixed-bf16-fp8")
    found = compared(model, engine, sampled(engine))
    first = found.first
    assert first is not None
    assert first.site == "model.layers.0.self_attn.q_proj"
    assert (first.operator, first.rollout_operator) == ("invariant_matmul", "block_fp8_matmul")
    assert found.evidence == ("format of the forward: learner bf16, rollout fp8",)
    assert "model.layers.0.self_attn.q_proj.input" in found.one_side_only


def test_a_forward_that_departs_from_the_program_is_refused() -> None:
    """Nothing is attributed to a wrong place: a missing and an extra operator raise, naming where."""
    model, _ = make_pair("qwen3", "bf16")
    rows = torch.arange(2)
    batch = PackedBatch.from_sequences([[3, 4]])
    stopped = pytest.raises(TraceError, match=r"stopped before model\.layers\.0\.input_layernorm")
    with stopped, Recorder(model).forward(rows):
        pass
    beyond = pytest.raises(TraceError, match=r"rms_norm was called where the program has the end")
    with torch.no_grad(), beyond, Recorder(model).forward(rows):
        model.model.norm(model(batch))


def test_differences_that_are_not_finite_are_reported_without_inf_in_json() -> None:
    """NaN on one side counts as different; max_abs is inf here and null in JSON."""
    model, engine = make_pair("qwen3", "bf16")
    workload = Workload.prompts_only([[3, 4, 5]])

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.full_like(reference.silu_mul(gate, up), float("nan"))

    learner = trace_learner(model, workload)
    with bound("silu_mul", silu_mul):
        found = compare_traces(learner, trace_rollout(engine.model, workload), workload)
    first = found.first
    assert first is not None
    assert first.site == "model.layers.0.mlp.silu_mul"
    assert first.differing == first.elements
    assert first.max_abs == float("inf")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["first"]["max_abs"] is None
