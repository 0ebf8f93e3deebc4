"""The bisecting tool on equal sides: equal after every operator, whatever the policy; and how it counts distances."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from precision_policies import available, load_policy
from rllib_llm.engines import EngineUnavailableError
from rllib_llm.mismatch.localise import compare_traces, localise, ulps
from rllib_llm.mismatch.program import body, head
from rllib_llm.mismatch.workload import ENGINE_SITE, Workload, trace_learner, trace_rollout
from rllib_llm.models import causal_lm
from tests.mismatch.localise_cases import LENGTHS, compared, make_pair, sampled
from tests.models.cases import CONFIGS, random_sequences


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_equal_sides_are_equal_after_every_operator(kind: str, policy: str) -> None:
    """Sampling at temperature 0.7 with 2 answers a prompt, prefill in chunks of 7, decode: every site of the program
    is compared, over all tokens that the rollout feeds, and nothing differs."""
    model, engine = make_pair(kind, policy)
    workload = sampled(engine, temperature=0.7, n=2)
    found = compared(model, engine, workload, max_prefill_tokens=7)
    assert found.equal
    assert found.first is None
    assert found.evidence == found.one_side_only == ()
    steps = {s.site for s in (*body(model.architecture, model.plan), *head())}
    assert steps | {"model.embed_tokens", "rotary_table", ENGINE_SITE} <= {c.site for c in found.comparisons}
    fed = workload.starts[-1] - len(workload.samples)
    scored = sum(len(s.answer) for s in workload.samples)
    for c in found.comparisons:
        assert c.tokens == (scored if c.site in ("lm_head", "log_probs", ENGINE_SITE) else fed), c
        assert c.elements >= c.tokens > 0
    parts = {c.part for c in found.comparisons if c.site.endswith("o_proj.input")}
    assert parts == ({"codes", "scales"} if policy == "unified-fp8" else set())


ON_POLICY = [name for name in available() if load_policy(name).exactly_on_policy]


@pytest.mark.parametrize("name", [*ON_POLICY, "fp8 saved by the activation"])
def test_every_on_policy_policy_can_be_traced(name: str) -> None:
    """Other scale formats and saved formats call other operators around the compared ones; the learner's logits in
    chunks of 3 rows change nothing either."""
    policy: Any = name
    if name not in ON_POLICY:
        policy = load_policy("unified-fp8").to_dict() | {"name": "saved"}
        policy["activation"]["saved"] = "fp8"
    model, engine = make_pair("qwen3", policy)
    workload = sampled(engine, 4)
    rollout = trace_rollout(engine.model, workload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "LOGITS_CHUNK_ELEMENTS", 3 * model.architecture.vocab)
        learner = trace_learner(model, workload)
    scored = sum(len(s.answer) for s in workload.samples)
    assert learner.sites["lm_head"].row_counts == [3] * (scored // 3) + [scored % 3] * (scored % 3 > 0)
    assert compare_traces(learner, rollout, workload).equal


def test_prefill_alone_scores_the_prompts() -> None:
    """Without answers every prompt token but the first of each has a log-prob, and there is nothing the engine said."""
    model, engine = make_pair("llama", "unified-fp8")
    workload = Workload.prompts_only(random_sequences(LENGTHS, 130))
    found = compared(model, engine, workload)
    assert found.equal
    by_site = {c.site: c for c in found.comparisons}
    assert by_site["log_probs"].tokens == sum(LENGTHS) - len(LENGTHS)
    assert by_site["model.norm"].tokens == sum(LENGTHS)
    assert ENGINE_SITE not in by_site
    nothing_to_score = compared(model, engine, Workload.prompts_only([[7]]))
    assert nothing_to_score.equal
    assert "log_probs" not in {c.site for c in nothing_to_score.comparisons}


def test_engines_out_of_reach_are_refused_by_name() -> None:
    """Whether or not vLLM is installed, the error says what the tool cannot do and what to use."""
    with pytest.raises(
        EngineUnavailableError, match=r"'vllm' runs the model in a process of its own.*engine='torch'"
    ):
        localise("tiny-chain", "bf16", [[5, 6]], engine="vllm")


def test_traces_travel_between_processes() -> None:
    """A pickled trace compares as the original: what is sent does not hold on to the model."""
    model, engine = make_pair("qwen3", "unified-fp8")
    workload = sampled(engine, 2)
    ours, theirs = (
        pickle.loads(pickle.dumps(t))
        for t in (trace_learner(model, workload), trace_rollout(engine.model, workload))
    )
    assert compare_traces(ours, theirs, workload).equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_ulps_count_representable_numbers(dtype: torch.dtype) -> None:
    """Neighbours of 1 and across a binade are 1 apart, the smallest numbers around zero 2, -0 and 0 none, NaN and NaN
    none, NaN and a number more than nothing."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]

    def after(x: float, steps: int) -> torch.Tensor:
        return (torch.tensor([x]).to(dtype).view(kind) + steps).view(dtype)

    def number(x: float) -> torch.Tensor:
        return torch.tensor([x]).to(dtype)

    assert ulps(after(1.0, 1), number(1.0)).item() == 1
    assert ulps(after(1.0, -1), number(1.0)).item() == 1
    assert ulps(after(-1.0, 3), number(-1.0)).item() == 3
    assert ulps(after(0.0, 1), after(-0.0, 1)).item() == 2
    assert ulps(number(-0.0), number(0.0)).item() == 0
    nan = number(float("nan"))
    other_nan = (nan.view(kind) ^ torch.iinfo(kind).min).view(dtype)
    assert ulps(nan, nan).item() == ulps(nan, other_nan).item() == 0
    assert ulps(nan, number(1.0)).item() > 0
