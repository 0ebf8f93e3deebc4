"""The thread that steps vLLM, with an engine made of two lists: no vLLM is needed."""

from __future__ import annotations

from typing import Any

import pytest

from rllib_llm.engines import EngineError
from rllib_llm.engines.vllm.background import Background


class Engine:
    """Fails in every step while `broken`; else does nothing."""

    def __init__(self) -> None:
        self.broken, self.unfinished = True, []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.unfinished.append(name)

    def abort_request(self, names: list[str]) -> None:
        self.unfinished = [name for name in self.unfinished if name not in names]

    def step(self) -> list[Any]:
        if self.broken:
            raise RuntimeError("no memory")
        return []


@pytest.fixture
def failed() -> tuple[Engine, Background]:
    """A background whose requests "a" and "b" were lost, which nobody has been told."""
    engine = Engine()
    background = Background(engine, lambda output: output)
    background.submit([("a", None, None), ("b", None, None)])
    assert background._thread is not None
    background._thread.join(10)
    engine.broken = False
    return engine, background


def test_new_requests_do_not_hide_that_earlier_ones_were_lost(failed: Any) -> None:
    """A submit after an untold failure is refused and begins nothing; the next one works."""
    engine, background = failed
    with pytest.raises(EngineError, match="no memory"):
        background.submit([("c", None, None)])
    assert engine.unfinished == []
    background.submit([("d", None, None)])
    assert background.pending == 1
    background.abort(["d"])


def test_a_failure_is_told_until_all_it_ended_was_aborted(failed: Any) -> None:
    """Who waits for "b" must hear of it although "a" was called off; after both nothing is left to tell."""
    _, background = failed
    background.abort(["a"])
    with pytest.raises(EngineError, match="no memory"):
        background.collect(5.0)
    assert background.collect(0.0) == {}


def test_an_aborted_failure_is_forgotten(failed: Any) -> None:
    """With every lost request aborted the next ones begin as if nothing had been."""
    _, background = failed
    background.abort(["a", "b"])
    background.submit([("c", None, None)])
    assert background.pending == 1
    background.abort(["c"])
