"""The bisecting tool looks at what a training step computes, too: other operators than those that score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from precision_kernels import Quantised, reference
from precision_policies import available, load_policy
from rllib_llm.mismatch.localise import Localisation, compare_traces, with_training
from rllib_llm.mismatch.workload import Workload, trace_learner
from tests.mismatch.localise_cases import bound
from tests.models.cases import CONFIGS, make_model, random_sequences

JOINABLE = LlamaConfig(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128, vocab_size=128,
    num_hidden_layers=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip


def saved_as_codes() -> Any:
    """`unified-fp8` with SiLU's inputs kept as codes."""
    policy = load_policy("unified-fp8").to_dict() | {"name": "saved"}
    policy["activation"]["saved"] = "fp8"
    return policy


def compared(model: Any, workload: Workload, scores: Any) -> Localisation:
    """A training step of the model against its scores, behind a comparison of these with a rollout's equal ones."""
    step = trace_learner(model, workload, training=True)
    return with_training(compare_traces(scores, scores, workload), step, scores, workload)


def joinable_model(monkeypatch: pytest.MonkeyPatch, policy: Any) -> Any:
    monkeypatch.setitem(CONFIGS, "joinable", lambda: JOINABLE)
    return make_model("joinable", policy)


@pytest.mark.parametrize("policy", [*available(), "saved"])
def test_a_training_step_gives_the_scores(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every shipped policy, operator by operator; residuals, codes, projections and log-probs are compared."""
    model = joinable_model(monkeypatch, saved_as_codes() if policy == "saved" else policy)
    workload = Workload.prompts_only(random_sequences((1, 17, 5), 128))
    found = compared(model, workload, trace_learner(model, workload))
    assert found.equal
    assert found.evidence == ()
    names = {c.site for c in found.comparisons}
    assert {"training.log_probs", "training.model.layers.1.mlp.down_proj", "training.model.norm"} <= names
    as_codes = {"model.layers.0.input_layernorm", *(f"model.layers.{i}.mlp.silu_mul" for i in range(2))}
    scored = {site for site in names if not site.startswith("training.")}
    assert {site for site in scored if f"training.{site}" not in names} <= as_codes


def other_scales(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with the first scale of its codes one ulp smaller."""

    def call(*arguments: Any) -> Any:
        codes, *rest = function(*arguments)
        scales = codes.scales.clone()
        scales.view(-1)[0] = torch.nextafter(scales.view(-1)[0], torch.tensor(0.0))
        return (Quantised(codes.codes, scales, codes.kind, codes.scale_format), *rest)

    return call


def other_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with one element of its first result changed."""

    def call(*arguments: Any) -> Any:
        values, *rest = function(*arguments)
        values[0, 0] += 1.0
        return (values, *rest)

    return call


@pytest.mark.parametrize(
    ("operator", "plant", "site"),
    [
        ("rms_norm_quantise", other_scales, "training.model.layers.0.self_attn.q_proj.input[scales]"),
        ("add_rms_norm_quantise", other_scales, "training.model.layers.0.mlp.gate_proj.input[scales]"),
        ("silu_mul_quantise_both", other_scales, "training.model.layers.0.mlp.down_proj.input[scales]"),
        ("silu_mul_saving", other_values, "training.model.layers.0.mlp.silu_mul"),
    ],
)
def test_an_operator_that_only_training_calls_is_named(
    operator: str, plant: Callable[[Any], Any], site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused norm or SiLU with another result: where its result is read, with its name and implementation."""
    model = joinable_model(monkeypatch, saved_as_codes() if "saving" in operator else "unified-fp8")
    workload = Workload.prompts_only(random_sequences((4, 9), 128))
    scores = trace_learner(model, workload)
    with bound(operator, plant(getattr(reference, operator))):
        found = compared(model, workload, scores)
    assert found.first is not None
    assert found.first.name == site
    assert found.first.operator == operator
    assert f"tests.{operator}@1" in found.evidence[0]
