"""What `submit`, `collect` and `abort` promise, for any engine that has weights and 128 ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rllib_llm.engines import EngineError, PromptError, SamplingParams, SamplingParamsError

PARAMS = SamplingParams(n=2, max_tokens=24, seed=7, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8], [9] * 40, [10, 11], [12] * 17]
SEEDS = [100, 101, 102, 103, 104]


# What is expected at once is waited for this long: an engine that waits for nothing meets the time limit of the test.
HOURS = 8 * 3600.0


def collect_all(engine: Any) -> dict[int, Any]:
    done: dict[int, Any] = {}
    while engine.pending:
        done |= engine.collect(HOURS)
    return done


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        np.array_equal(x.token_ids, y.token_ids)
        and np.array_equal(x.logprobs, y.logprobs)
        and (x.finish_reason, x.weights_version) == (y.finish_reason, y.weights_version)
        for x, y in zip(a, b, strict=True)
    )


def check_uneven_arrival(engine: Any) -> None:
    """Requests that arrive while others run get the completions that one call of `generate` gives."""
    expected = engine.generate(PROMPTS, PARAMS, SEEDS)
    ids = engine.submit(PROMPTS[:2], PARAMS, SEEDS[:2])
    done = engine.collect(0.0)
    ids += engine.submit(PROMPTS[2:4], dataclasses.replace(PARAMS, seed=99), SEEDS[2:4])
    done |= engine.collect(HOURS)
    assert done, "waits for one request, not for none"
    ids += engine.submit(PROMPTS[4:], PARAMS, SEEDS[4:])
    done |= collect_all(engine)
    assert sorted(done) == ids
    assert len(set(ids)) == len(PROMPTS)
    for request, row in zip(ids, expected, strict=True):
        assert same(done[request], row)
    assert engine.submit([], PARAMS) == []
    assert engine.collect(HOURS) == {}  # nothing is pending: returns at once


def check_abort(engine: Any) -> None:
    """Aborted requests end without completions and disturb no other; the engine samples on."""
    expected = engine.generate(PROMPTS[:2], PARAMS, SEEDS[:2])
    long = dataclasses.replace(PARAMS, max_tokens=60)
    slow = engine.submit(PROMPTS, long, SEEDS)
    engine.collect(0.0)
    assert engine.abort([*slow[1:3], slow[1]]) == slow[1:3]
    assert engine.abort(slow[1:3]) == []
    assert engine.pending == 3
    done = collect_all(engine)
    assert sorted(done) == [slow[0], *slow[3:]]
    again = engine.submit(PROMPTS[:2], PARAMS, SEEDS[:2])
    assert engine.abort() == again
    assert engine.pending == 0
    assert all(
        same(a, b) for a, b in zip(engine.generate(PROMPTS[:2], PARAMS, SEEDS[:2]), expected, strict=True)
    )


def check_refusals(engine: Any, update: Any) -> None:
    """While requests are pending: no other parameters, `generate`, update or sleep; a bad prompt begins nothing."""
    with pytest.raises(PromptError):
        engine.submit([[5], []], PARAMS)
    with pytest.raises(ValueError, match="one non-negative integer per prompt"):
        engine.submit([[5]], dataclasses.replace(PARAMS, temperature=0.5), [1, 2])
    assert engine.submit([], PARAMS) == []
    assert engine.pending == 0
    [request] = engine.submit([[5]], dataclasses.replace(PARAMS, max_tokens=60))
    with pytest.raises(SamplingParamsError, match="one distribution at a time"):
        engine.submit([[5]], dataclasses.replace(PARAMS, max_tokens=60, temperature=0.5))
    version = engine.weights_version
    for refused in (lambda: engine.generate([[5]], PARAMS), lambda: engine.update_weights(update)):
        with pytest.raises(EngineError, match=r"1 submitted request\(s\) are pending"):
            refused()
    assert engine.weights_version == version
    assert engine.abort([request]) == [request]
    engine.update_weights(update)
    assert engine.weights_version == update.version


def check_pause(engine: Any, update: Any) -> None:
    """Paused and resumed requests end with the bits of an undisturbed call; none outlives an update."""
    expected = engine.generate(PROMPTS, PARAMS, SEEDS)
    engine.pause()
    with pytest.raises(EngineError, match=r"call resume\(\) first"):
        engine.generate(PROMPTS, PARAMS, SEEDS)
    ids = engine.submit(PROMPTS, PARAMS, SEEDS)
    assert engine.collect(HOURS) == {}  # a paused engine is not waited for
    done: dict[int, Any] = {}
    while engine.pending:
        engine.resume()
        done |= engine.collect(0.01)
        engine.pause()
        done |= engine.collect(0.0)
    engine.resume()
    assert all(same(done[request], row) for request, row in zip(ids, expected, strict=True))

    ids = engine.submit(PROMPTS, PARAMS, SEEDS)
    engine.pause()
    version = engine.weights_version
    named = ", ".join(map(str, ids))
    with pytest.raises(EngineError, match=rf"5 submitted .* are pending \({named}\): collect or abort"):
        engine.update_weights(update)
    assert engine.weights_version == version
    assert engine.abort() == ids
    engine.update_weights(update)
    engine.resume()
    [request] = engine.submit(PROMPTS[:1], PARAMS, SEEDS[:1])
    assert {c.weights_version for c in collect_all(engine)[request]} == {update.version}
