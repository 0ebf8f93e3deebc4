"""Weights by a broadcast instead of Ray's object store, in the whole loop; and a transport that cannot be had."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import metric_names as names
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.rollout.env_runner import Reply
from rllib_llm.sync.topology import WeightTransportError

Make = Callable[..., Any]
HOURS = 8 * 3600.0


def _held(runner: Any) -> Reply:
    return Reply(runner.worker_index, (runner.engine.weights_version, dict(runner.engine.attest().weights)))


def _die_of_the_next_update(runner: Any) -> Reply:
    runner.engine.update_weights = lambda update: os.kill(os.getpid(), signal.SIGKILL)
    return Reply(runner.worker_index)


def test_a_broadcast_serves_all_runners_and_survives_the_death_of_one(
    build: Make, toy_config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A remote learner and two env runners over gloo: mismatch 0, both hold what the learner has; when one dies in the
    middle of a push the other gets the weights at once, and the restarted one gets them too."""
    config = (
        toy_config("unified-fp8", weight_transport="gloo", push_timeout_s=HOURS)
        .learners(num_learners=1)
        .env_runners(num_env_runners=2)
    )
    with caplog.at_level(logging.INFO, logger="rllib_llm.algorithm.weight_sync"):
        algo = build(config)
    assert "weights to env runner 2 by gloo (asked for)" in caplog.text
    for _ in range(2):
        assert algo.train()[names.MISMATCH]["max_abs"] == 0
    held = call_runners(algo.env_runner_group, _held).answers
    assert len(held) == 2
    assert {reply.value[0] for reply in held.values()} == {algo.weights.version}
    assert all(reply.value[1] == dict(algo.weights._sent.hashes) for reply in held.values())
    call_runners(algo.env_runner_group, _die_of_the_next_update, [1])
    algo.train()  # does not wait for the dead: HOURS are beyond the time limit of the test
    while True:
        result = algo.train()
        held = call_runners(algo.env_runner_group, _held).answers
        if len(held) == 2:
            break
    assert result[names.MISMATCH]["max_abs"] == 0
    assert {runner: reply.value[0] for runner, reply in held.items()} == dict.fromkeys(
        (1, 2), algo.weights.version
    )


def test_engines_sleep_while_the_learner_computes(build: Make) -> None:
    """Every optimiser step finds the engines asleep; they wake for the push, and nothing of the run changes."""
    seen = []
    results = {}
    for sleeping in (False, True):
        algo = build(sleep_while_learning=sleeping)
        learn, engine = algo._learn, algo.env_runner.engine

        def watched(*arguments: Any, learn: Any = learn, engine: Any = engine) -> None:
            seen.append(engine._state.asleep)
            learn(*arguments)

        algo._learn = watched
        results[sleeping] = [algo.train() for _ in range(2)]
        assert not engine._state.asleep
    assert seen == [False, False, True, True]
    for awake, slept in zip(results[False], results[True], strict=True):
        assert slept[names.MISMATCH]["max_abs"] == 0
        key = names.ENV_RUNNERS
        assert awake[key][names.EPISODE_RETURN_MEAN] == slept[key][names.EPISODE_RETURN_MEAN]


def test_a_transport_that_cannot_be_used_is_refused_with_the_reason(build: Make) -> None:
    """CUDA IPC for an engine on the CPU: an error that names both places, never another transport."""
    with pytest.raises(
        WeightTransportError, match=r"weight_transport=cuda_ipc: .* not on the same GPU .*the CPU"
    ):
        build(weight_transport="cuda_ipc")


def test_a_local_engine_that_breaks_ends_the_push(build: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before the engine has joined the push is raised at once; the learner does not wait for the engine."""
    algo = build(push_timeout_s=HOURS)
    monkeypatch.setattr(
        "rllib_llm.algorithm.weight_sync.choose_transport", lambda *places: ("gloo", "planted")
    )

    def broken(update: Any) -> Any:
        raise ZeroDivisionError("planted")

    algo.env_runner.engine.update_weights = broken
    with pytest.raises(RuntimeError, match="planted"):
        algo.train()
