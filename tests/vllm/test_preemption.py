"""vLLM preempts requests when the KV cache is full and computes them again: the bits stay the learner's."""

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

from rllib_llm.engines import SamplingParams
from rllib_llm.sync.export import export_weights
from tests.vllm.cases import deltas, prompts, ragged_config, random_learner, start

PARAMS = SamplingParams(n=2, max_tokens=160, seed=11, ignore_eos=True)
BANNING = dataclasses.replace(PARAMS, min_tokens=150, stop_token_ids=tuple(range(3, 60)))


def count_preemptions(worker: Any) -> None:
    """In the engine's process: count from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._preempt_request
    worker.preemptions = 0

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        worker.preemptions += 1
        return original(self, *arguments, **keywords)

    Scheduler._preempt_request = counted


def test_preempted_requests_keep_the_learners_bits(ray_for_engines: None) -> None:
    """A cache that holds a third of ten growing sequences: requests are preempted, their answers so far come back as
    prefill, and every log-prob equals the learner's; so does the ban of stop ids before min_tokens, whose count of
    tokens starts before the preemption."""
    config = ragged_config("qwen3")
    model = random_learner(config, "unified-fp8")
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    asked = prompts(2, 5)
    engine = start(config, "unified-fp8", kv_cache_bytes=1024 * per_token)
    try:
        engine.update_weights(export_weights(model, 1))
        engine._actor.inspect(count_preemptions)
        answers = engine.generate(asked, PARAMS)
        preemptions = [engine._actor.inspect(lambda worker: worker.preemptions)]
        banning = engine.generate(asked, BANNING)
        preemptions.append(engine._actor.inspect(lambda worker: worker.preemptions))
    finally:
        engine.close()
    assert 0 < preemptions[0] < preemptions[1]
    delta = deltas(model, asked, answers, PARAMS)
    assert len(delta) == len(asked) * PARAMS.n * PARAMS.max_tokens
    assert np.abs(delta).max() == 0
    banned = BANNING.stop_token_ids
    assert np.abs(deltas(model, asked, banning, BANNING, banned)).max() == 0
    for completion in (c for row in banning for c in row):
        assert not set(completion.token_ids[: BANNING.min_tokens].tolist()) & set(banned)
