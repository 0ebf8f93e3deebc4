"""The state of an engine: which call each state refuses, and with which words."""

from __future__ import annotations

import pytest

from rllib_llm.engines.base import NO_WEIGHTS
from rllib_llm.engines.state import EngineState, require_sleep_level
from rllib_llm.errors import EngineError
from tests.models.cases import make_model

CHECKS = ("require_open", "require_awake", "require_weights")


@pytest.mark.parametrize(
    ("state", "refused", "words"),
    [
        (EngineState(version=3), 0, ""),
        (EngineState(version=3, paused=True), 0, ""),
        (EngineState(), 1, "has no weights yet"),
        (EngineState(version=3, asleep=True), 2, "sleeps: call wake"),
        (EngineState(asleep=True), 2, "sleeps: call wake"),
        (EngineState(version=3, closed=True), 3, "is closed: make a new one"),
        (EngineState(version=3, asleep=True, closed=True), 3, "is closed: make a new one"),
    ],
)
def test_a_stricter_check_refuses_what_a_weaker_one_does(
    state: EngineState, refused: int, words: str
) -> None:
    """Closed refuses all, asleep what needs the model, no weights what samples; the gravest state is named."""
    for index, check in enumerate(CHECKS):
        if index < len(CHECKS) - refused:
            getattr(state, check)()
        else:
            with pytest.raises(EngineError, match=words):
                getattr(state, check)()


def test_only_a_paused_engine_refuses_to_sample_at_once() -> None:
    """`require_sampling` says how to go on; close forgets the weights."""
    state = EngineState(version=0)
    state.require_sampling()
    state.paused = True
    with pytest.raises(EngineError, match="call resume"):
        state.require_sampling()
    state.close()
    assert (state.closed, state.version) == (True, NO_WEIGHTS)


@pytest.mark.parametrize("level", [-1, 0, 3, 1.5])
def test_levels_of_sleep_that_there_are_not_are_refused(level: int) -> None:
    """One sentence for all engines; 1 and 2 pass."""
    with pytest.raises(ValueError, match=r"sleep\(level="):
        require_sleep_level(level)
    require_sleep_level(1)
    require_sleep_level(2)


def test_the_module_of_a_sleeping_engine_is_not_called_closed() -> None:
    """After sleep(level=2) there is no module until wake(), and the error says so; after close it says closed."""
    from rllib_llm.engines.factory import make_engine

    engine = make_engine("torch", make_model("qwen3", "bf16").config, "bf16")
    engine.sleep(level=2)
    with pytest.raises(EngineError, match="sleeps"):
        _ = engine.model
    engine.wake()
    assert engine.model is not None
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        _ = engine.model
