"""Requests that come and go, in vLLM: it samples in its own process while the caller does something else."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from rllib_llm.engines import EngineError
from rllib_llm.sync.export import export_weights
from tests.engines import async_cases


def test_requests_that_arrive_unevenly_get_what_generate_gives(qwen3: tuple[Any, Any]) -> None:
    """Requests added between steps join the running batch: tokens and log-prob bits as of one call."""
    async_cases.check_uneven_arrival(qwen3[1])


def test_aborted_requests_disturb_no_other(qwen3: tuple[Any, Any]) -> None:
    """Running requests can be ended; the others' bits do not change."""
    async_cases.check_abort(qwen3[1])


def test_what_would_mix_versions_or_distributions_is_refused(qwen3: tuple[Any, Any]) -> None:
    """Nothing changes under a pending request."""
    model, engine = qwen3
    async_cases.check_refusals(engine, export_weights(model, 61))


def test_a_pause_changes_no_bit_and_no_request_outlives_an_update(qwen3: tuple[Any, Any]) -> None:
    """Paused again and again, requests end as they would have; an update names those that it would have mixed."""
    model, engine = qwen3
    async_cases.check_pause(engine, export_weights(model, 62))


def test_a_paused_engine_takes_no_step(qwen3: tuple[Any, Any]) -> None:
    """While paused, what the scheduler holds does not move, and its keys stay where they are."""
    _, engine = qwen3

    def state(worker: Any) -> Any:
        scheduler = worker.llm.llm_engine.engine_core.engine_core.scheduler
        return [
            (r.request_id, r.num_output_tokens, scheduler.kv_cache_manager.get_block_ids(r.request_id))
            for r in scheduler.running
        ]

    engine.submit([[5, 6]] * 8, dataclasses.replace(async_cases.PARAMS, max_tokens=400))
    while not engine._actor.inspect(state):
        time.sleep(0.01)
    engine.pause()
    held = engine._actor.inspect(state)
    time.sleep(0.5)
    assert engine._actor.inspect(state) == held
    assert len(held) == 16
    engine.resume()
    while engine._actor.inspect(state) == held:
        time.sleep(0.01)
    engine.abort()


def test_vllm_samples_while_nobody_waits(qwen3: tuple[Any, Any]) -> None:
    """A request is complete when the caller comes back, without a call in between."""
    _, engine = qwen3
    [request] = engine.submit([[5, 6]], async_cases.PARAMS, [1])
    while not (done := engine.collect(0.0)):
        time.sleep(0.1)
    assert list(done) == [request]


def test_an_interrupted_collect_leaves_nothing_pending(
    qwen3: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions that were on their way when the caller was interrupted are gone: no request waits for them."""
    _, engine = qwen3
    call = engine._actor.call

    def interrupted(method: str, *arguments: Any, **keywords: Any) -> Any:
        answer = call(method, *arguments, **keywords)
        if method == "collect" and answer:
            raise KeyboardInterrupt
        return answer

    engine.submit([[5, 6], [7]], async_cases.PARAMS)
    monkeypatch.setattr(engine._actor, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        async_cases.collect_all(engine)
    monkeypatch.undo()
    assert engine.pending == 0
    assert len(engine.generate([[5]], async_cases.PARAMS)[0]) == 2


def test_a_failing_step_is_an_error_of_collect(qwen3: tuple[Any, Any]) -> None:
    """What breaks in the stepping thread is raised to the caller, the requests are lost, and the engine goes on."""
    _, engine = qwen3

    def break_once(worker: Any) -> None:
        step = worker.llm.llm_engine.step

        def broken() -> Any:
            worker.llm.llm_engine.step = step
            raise RuntimeError("planted")

        worker.llm.llm_engine.step = broken

    engine._actor.inspect(break_once)
    engine.submit([[5, 6]], async_cases.PARAMS)
    with pytest.raises(EngineError, match="vLLM failed while it sampled: planted"):
        async_cases.collect_all(engine)
    assert engine.pending == 0
    assert len(engine.generate([[5]], async_cases.PARAMS)[0]) == 2
