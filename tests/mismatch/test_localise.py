"""The bisecting tool: equal sides are equal after every operator, and a planted difference is named where it is."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from precision_kernels import Implementation, Quantised, bind, reference
from precision_kernels.dispatch import _table
from precision_policies import available, load_policy
from rllib_llm.cli.main import main
from rllib_llm.engines import EngineUnavailableError, SamplingParams, make_engine
from rllib_llm.mismatch.localise import Localisation, compare_traces, localise, ulps
from rllib_llm.mismatch.program import KINDS, Step, body, head
from rllib_llm.mismatch.trace import Recorder, TraceError
from rllib_llm.mismatch.workload import ENGINE_SITE, Token, Workload, trace_learner, trace_rollout
from rllib_llm.models import PackedBatch, causal_lm
from rllib_llm.sync.export import export_weights
from tests.models.cases import CONFIGS, make_model, random_sequences

LENGTHS = (1, 17, 5)


@contextmanager
def bound(operator: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another implementation of one operator on the CPU, for one phase."""
    before = _table("cpu")[operator]
    bind(operator, "cpu", Implementation(f"tests.{operator}", "1", function))
    try:
        yield
    finally:
        bind(operator, "cpu", before)


def make_pair(kind: str, policy: Any) -> tuple[Any, Any]:
    """(learner's model, embedded engine with its weights)."""
    model = make_model(kind, policy)
    engine = make_engine("torch", model.config, policy)
    engine.update_weights(export_weights(model, 1))
    return model, engine


def sampled(engine: Any, new_tokens: int = 5, **options: Any) -> Workload:
    prompts = random_sequences(LENGTHS, engine.model.architecture.vocab)
    return Workload.sampled(engine, prompts, SamplingParams(max_tokens=new_tokens, seed=3, **options))


def compared(model: Any, engine: Any, workload: Workload, **options: Any) -> Localisation:
    return compare_traces(
        trace_learner(model, workload), trace_rollout(engine.model, workload, **options), workload
    )


# ---- equal sides -----------------------------------------------------------------------------------------------------


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


# ---- planted differences ---------------------------------------------------------------------------------------------


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
        self.before = {operator: _table("cpu")[operator] for operator in KINDS}
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


# ---- ulps ------------------------------------------------------------------------------------------------------------


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


# ---- command line ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return main(["mismatch", "localise", "--model", "tiny-chain", *arguments])


def test_cli_equal_is_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The shipped model under unified-fp8, prompts from a file and the command line, training too: exit status 0."""
    file = tmp_path / "prompts.txt"
    file.write_text("7 - 2 =\n\n4 + 4 =\n")
    assert (
        run("--policy", "unified-fp8", "--prompts", str(file), "--prompt", "3 + 4 =", "--max-new-tokens", "3")
        == 0
    )
    out = capsys.readouterr().out
    assert "EQUAL" in out
    assert re.search(r"compared +199 operator outputs, 0 of them differ", out)


def test_cli_different_is_3_and_names_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """The mixed policy: exit status 3, operator, elements, ulps and token in the table; --all has every operator."""
    arguments = ("--policy", "mixed-bf16-fp8", "--prompt", "3 + 4 =", "--max-new-tokens", "2")
    assert run(*arguments) == 3
    out = capsys.readouterr().out
    assert "FIRST DIFFERENCE: model.layers.0.self_attn.q_proj (learner: invariant_matmul, rollout:" in out
    assert re.search(r"elements +\d+ of \d+ differ .* by up to \d+ ulp of bfloat16", out)
    assert "first at prompt 0, position 0 (prompt)" in out
    assert re.search(r"^> +model\.layers\.0\.self_attn\.q_proj ", out, re.M)
    assert "more (--all)" in out
    assert run(*arguments, "--all") == 3
    full = capsys.readouterr().out
    assert "model.layers.3.mlp.down_proj" in full
    assert "more (--all)" not in full


def test_cli_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--json prints one object with the same answer; token ids need no tokenizer; 0 new tokens is prefill only."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 5, 9]}\n{"prompt": "3 + 4 ="}\n')
    common = ("--prompts", str(file), "--json")
    assert run("--policy", "bf16", *common, "--max-new-tokens", "0") == 0
    got = json.loads(capsys.readouterr().out)
    assert got["equal"] is True
    assert got["first"] is None
    assert (got["prompts"], got["new_tokens"]) == (2, 0)
    assert run("--policy", "mixed-bf16-fp8", *common, "--max-new-tokens", "2") == 3
    got = json.loads(capsys.readouterr().out)
    assert got["first"]["site"] == "model.layers.0.self_attn.q_proj"
    assert got["first"]["first"] == {"prompt": 0, "position": 0, "part": "prompt"}
    assert len(got["operators"]) > 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "bf16"], "no prompt"),
        (["--policy", "bf17", "--prompt", "x"], "bf17"),
        (["--policy", "bf16", "--prompt", "x", "--model", "no-such-dir"], "no-such-dir"),
        (["--policy", "bf16", "--prompts", "no-such-file"], "no-such-file"),
        (["--policy", "bf16", "--prompt", "x", "--engine", "tensorrt"], "one of torch, vllm"),
        (["--policy", "bf16", "--prompt", "x", "--engine", "vllm"], "vllm"),
        (["--policy", "bf16", "--prompt", "3 " * 600], "prompt"),
        (["--policy", "bf16", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--policy", "bf16", "--prompt", "x", "--device", "tpu"], "--device tpu"),
    ],
)
def test_cli_bad_input_is_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be run says why on standard error, with exit status 2 and nothing on standard output."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_cli_lists_every_bad_line_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three bad lines and a good one: all three are named."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1 ="}\n{"token_ids": []}\nnot json\n{"prompt": 3}\n')
    assert run("--policy", "bf16", "--prompts", str(file)) == 2
    err = capsys.readouterr().err
    assert [f"line {n}" in err for n in (1, 2, 3, 4)] == [False, True, True, True]
