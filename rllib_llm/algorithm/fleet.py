"""Calling env runners, local or remote, with results by runner and nothing swallowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from rllib_llm.rollout.env_runner import Reply

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

__all__ = ["LOCAL", "Replies", "call_runners", "runner_ids"]

LOCAL = 0  # RLlib's index of the runner inside the Algorithm's process


@dataclass
class Replies:
    """Outcome of one call on several runners, by runner index."""

    answers: dict[int, Reply] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)
    """actors that ended; RLlib has marked them unhealthy and restarts them"""
    timed_out: list[int] = field(default_factory=list)


def runner_ids(group: EnvRunnerGroup) -> list[int]:
    """Runners that can be called now: the healthy remote ones, or the local one where there are no remote ones."""
    if group.num_remote_env_runners() == 0:
        return [LOCAL]
    return list(group.healthy_env_runner_ids())


def call_runners(
    group: EnvRunnerGroup,
    call: Callable[[Any], Reply] | Mapping[int, Callable[[Any], Reply]],
    ids: Sequence[int] | None = None,
    timeout_s: float | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> Replies:
    """Applies `call` (or one call per runner) to runners and waits for all.

    `EnvRunnerGroup.foreach_env_runner` drops failed calls and says neither which nor why; this asks the actor
    manager below it. An exception of the local runner propagates: there is no other runner to go on with.

    Args:
        on_failure: called with what happened as soon as a runner died or answered with an error, while others are still
            waited for; for calls in which runners wait for one another.
    """
    calls = (
        dict(call)
        if isinstance(call, Mapping)
        else dict.fromkeys(runner_ids(group) if ids is None else ids, call)
    )
    replies = Replies()
    if LOCAL in calls:
        reply = calls.pop(LOCAL)(group.local_env_runner)
        if reply.error is not None:
            raise RuntimeError(f"the local env runner failed:\n{reply.error}")
        replies.answers[LOCAL] = reply
    if not calls:  # an empty list of ids would mean "all actors" to the manager
        return replies
    _call_remote(group, calls, replies, timeout_s, on_failure)
    return replies


def _call_remote(
    group: EnvRunnerGroup,
    calls: Mapping[int, Callable[[Any], Reply]],
    replies: Replies,
    timeout_s: float | None,
    on_failure: Callable[[str], None] | None,
) -> None:
    """Calls actors and records what they answer, as it comes."""
    manager = group._worker_manager
    sent = manager._call_actors(list(calls.values()), kwargs=[{}] * len(calls), remote_actor_ids=list(calls))
    waiting = dict(zip(sent, calls, strict=True))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not ready:
            break
        runner = waiting.pop(ready[0])
        # The manager takes a dead actor out of service, so that RLlib restarts it.
        _, results = manager._fetch_result(remote_actor_ids=[runner], remote_calls=ready, tags=[None])
        failure = _record(replies, runner, next(iter(results)))
        if failure and on_failure is not None:
            on_failure(failure)
    replies.timed_out = sorted(waiting.values())


def _record(replies: Replies, runner: int, result: Any) -> str | None:
    """Keep a result; in words what went wrong, if something did."""
    if not result.ok:
        replies.died.append(runner)
        return f"env runner {runner} died"
    reply = replies.answers[runner] = result.get()
    return None if reply.error is None else f"env runner {runner} refused"
