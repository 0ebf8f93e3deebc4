"""`min_tokens` in vLLM: the first so many tokens end nothing, and their log-probs are the learner's to the bit."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from rllib_llm.engines import SamplingParams, SamplingParamsError
from rllib_llm.engines.vllm.requests import check_params
from rllib_llm.sync.export import export_weights
from tests.engines.async_cases import collect_all
from tests.vllm.cases import deltas, prompts

EOS = 2
STOPS = tuple(range(3, 120))
"""More than half of the vocabulary: unbanned, an answer would end at once."""
PARAMS = SamplingParams(n=2, max_tokens=40, min_tokens=12, seed=4, stop_token_ids=STOPS)
KINDS = {
    "plain": PARAMS,
    "truncated": dataclasses.replace(PARAMS, temperature=0.7, top_k=20, top_p=0.9),
    "warm": dataclasses.replace(PARAMS, temperature=1.3),
    "greedy": dataclasses.replace(PARAMS, n=1, temperature=0),
    "eos alone": dataclasses.replace(PARAMS, stop_token_ids=()),
    "eos ignored": dataclasses.replace(PARAMS, ignore_eos=True),
    "all": dataclasses.replace(PARAMS, min_tokens=40),
}


def banned(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}


def check(model: Any, asked: Any, answers: Any, params: SamplingParams) -> None:
    """No banned id among the first tokens, every log-prob as the learner has it, and the ban was felt."""
    assert np.abs(deltas(model, asked, answers, params, tuple(sorted(banned(params))))).max() == 0
    rows = [c for row in answers for c in row]
    assert not any(set(c.token_ids[: params.min_tokens].tolist()) & banned(params) for c in rows)
    for c in rows:
        assert (c.finish_reason == "stop") == (int(c.token_ids[-1]) in banned(params))
    unaware = deltas(model, asked, answers, params)
    assert np.abs(unaware).max() > 0, "the ban changed no probability: nothing was tested"


@pytest.mark.parametrize("kind", KINDS)
def test_banned_ids_leave_the_distribution_that_the_learner_scores(qwen3: tuple[Any, Any], kind: str) -> None:
    """Stop ids in turn different ones, with temperature, truncation, greedy, end-of-sequence alone or ignored."""
    model, engine = qwen3
    engine.update_weights(export_weights(model, 70 + list(KINDS).index(kind)))
    params, asked = KINDS[kind], prompts(7)
    answers = engine.generate(asked, params)
    check(model, asked, answers, params)
    if len(banned(params)) > 100 and params.min_tokens < params.max_tokens:
        assert min(len(c.token_ids) for row in answers for c in row) == params.min_tokens + 1


def test_rows_at_different_ages_are_told_apart(qwen3: tuple[Any, Any]) -> None:
    """Requests that arrive while others are past min_tokens: each row has its own ban."""
    model, engine = qwen3
    engine.update_weights(export_weights(model, 80))
    asked = prompts(8, 5)
    params = dataclasses.replace(PARAMS, max_tokens=60, stop_token_ids=tuple(range(3, 20)))
    ids, done = [], {}
    for prompt in asked:
        ids += engine.submit([prompt], params, [17])
        done |= engine.collect(0.05)
    done |= collect_all(engine)
    check(model, asked, [done[i] for i in ids], params)


def test_the_context_may_end_before_min_tokens(qwen3: tuple[Any, Any]) -> None:
    """A prompt that leaves fewer tokens of the context ends as "length", with the ban on all of them."""
    model, engine = qwen3
    engine.update_weights(export_weights(model, 81))
    asked = [[5, 6, 7] * 168]
    answers = engine.generate(asked, dataclasses.replace(PARAMS, n=4))
    assert {(len(c.token_ids), c.finish_reason) for c in answers[0]} == {(8, "length")}
    check(model, asked, answers, PARAMS)


def test_more_stop_ids_than_vllm_keeps_are_refused(qwen3: tuple[Any, Any]) -> None:
    """And so are ids that the model does not have; the engine lives on."""
    _, engine = qwen3
    with pytest.raises(SamplingParamsError, match=r"stop_token_ids=\[200\](?s:.*)with 149 end-of-seq"):
        engine.generate([[3]], dataclasses.replace(PARAMS, stop_token_ids=(*range(3, 150), 200)))
    assert len(engine.generate([[3]], dataclasses.replace(PARAMS, min_tokens=0))[0]) == 2


def test_drafted_tokens_and_min_tokens_are_refused_together() -> None:
    """A model that sees several rows of a request cannot tell their ages; without a minimum nothing is refused."""
    check_params(dataclasses.replace(PARAMS, min_tokens=0), (EOS,), 192, True, True)
    with pytest.raises(SamplingParamsError, match=r"min_tokens=12 with vllm_options\['speculative_config'\]"):
        check_params(PARAMS, (EOS,), 192, True, True)
