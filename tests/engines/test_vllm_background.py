"""The thread that steps vLLM, with an engine made of two lists: no vLLM is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rllib_llm.engines import EngineError
from rllib_llm.engines.vllm.background import Background

MINUTES = 600.0  # at most, for what takes milliseconds


class Engine:
    """Fails in every step while `broken`; else does nothing."""

    def __init__(self) -> None:
        self.broken, self.unfinished, self.stepped = True, [], threading.Event()

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.unfinished.append(name)

    def abort_request(self, names: list[str]) -> None:
        self.unfinished = [name for name in self.unfinished if name not in names]

    def step(self) -> list[Any]:
        if self.broken:
            raise RuntimeError("no memory")
        self.stepped.set()
        return []


@pytest.fixture
def failed() -> tuple[Engine, Background]:
    """A background whose requests "a" and "b" were lost, which nobody has been told."""
    engine = Engine()
    background = Background(engine, lambda output: output)
    background.submit([("a", None, None), ("b", None, None)])
    with background._changed:
        assert background._changed.wait_for(lambda: background._failure is not None, MINUTES)
    engine.broken = False
    return engine, background


def test_new_requests_do_not_hide_that_earlier_ones_were_lost(failed: Any) -> None:
    """A submit after an untold failure is refused and begins nothing; the next one works."""
    engine, background = failed
    with pytest.raises(EngineError, match="no memory"):
        background.submit([("c", None, None)])
    assert engine.unfinished == []
    background.submit([("d", None, None)])
    assert background.pending == ["d"]
    background.abort(["d"])


def test_a_failure_is_told_until_all_it_ended_was_aborted(failed: Any) -> None:
    """Who waits for "b" must hear of it although "a" was called off; after both nothing is left to tell."""
    _, background = failed
    background.abort(["a"])
    with pytest.raises(EngineError, match="no memory"):
        background.collect(MINUTES)
    assert background.collect(0.0) == {}


def test_an_aborted_failure_is_forgotten(failed: Any) -> None:
    """With every lost request aborted the next ones begin as if nothing had been."""
    _, background = failed
    background.abort(["a", "b"])
    background.submit([("c", None, None)])
    assert background.pending == ["c"]
    background.abort(["c"])


def test_requests_are_stepped_while_the_thread_of_a_failure_ends() -> None:
    """Told of a failure, a caller may submit before the operating system has ended the thread that failed."""
    engine = Engine()
    background = Background(engine, lambda output: output)
    run, ended = background._run, threading.Event()

    def slow_to_end() -> None:
        run()
        ended.wait(MINUTES)

    background._run = slow_to_end  # type: ignore[method-assign]
    background.submit([("a", None, None)])
    with pytest.raises(EngineError, match="no memory"):
        background.collect(MINUTES)
    engine.broken = False
    background.submit([("b", None, None)])
    stepped = engine.stepped.wait(MINUTES)
    background.abort(["b"])
    ended.set()
    assert stepped
