"""Requests that come and go, in the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rllib_llm.engines import EngineError
from rllib_llm.sync.export import export_weights
from tests.engines import async_cases
from tests.engines.cases import engine_of
from tests.models.cases import make_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def learner() -> Any:
    return make_model("qwen3", "unified-fp8")


@pytest.fixture
def engine(learner: Any) -> Iterator[Any]:
    made = engine_of(learner, max_num_seqs=3, max_model_len=128)
    yield made
    made.close()


def test_requests_that_arrive_unevenly_get_what_generate_gives(engine: Any) -> None:
    """More sequences than slots, arriving in three lots: tokens and log-prob bits as of one call."""
    async_cases.check_uneven_arrival(engine)


def test_aborted_requests_disturb_no_other(engine: Any) -> None:
    """Waiting, half-prefilled and running requests can be ended."""
    async_cases.check_abort(engine)


def test_what_would_mix_versions_or_distributions_is_refused(engine: Any, learner: Any) -> None:
    """Nothing changes under a pending request."""
    async_cases.check_refusals(engine, export_weights(learner, 2))


def test_a_pause_changes_no_bit_and_no_request_outlives_an_update(engine: Any, learner: Any) -> None:
    """Paused again and again, requests end as they would have; an update names those that it would have mixed."""
    async_cases.check_pause(engine, export_weights(learner, 2))


def test_collect_keeps_to_its_timeout_and_gives_partial_progress(engine: Any) -> None:
    """A call of no time makes one step; progress is kept until the request is complete."""
    [request] = engine.submit([[5]], async_cases.PARAMS)
    calls = 0
    done: dict[int, Any] = {}
    while not done:
        done = engine.collect(0.0)
        calls += 1
    assert list(done) == [request]
    assert 20 <= calls <= 25


def test_a_failure_loses_the_requests_and_not_the_engine(engine: Any, learner: Any) -> None:
    """Non-finite weights end pending requests with an error; after a good update the engine samples again."""
    good = export_weights(learner, 2)
    engine.model.get_buffer("model.norm.weight").fill_(np.inf)
    engine.submit([[5], [6]], async_cases.PARAMS)
    with pytest.raises(EngineError, match="not finite"):
        engine.collect(async_cases.HOURS)
    assert engine.pending == 0
    engine.update_weights(good)
    assert len(engine.generate([[5]], async_cases.PARAMS)[0]) == 2
