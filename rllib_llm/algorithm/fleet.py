"""Calling env runners, local or remote, with results by runner and nothing swallowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rllib_llm.env_runner import Reply

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
) -> Replies:
    """Applies `call` (or one call per runner) to runners and waits for all.

    `EnvRunnerGroup.foreach_env_runner` drops failed calls and says neither which nor why; this asks the actor
    manager below it. An exception of the local runner propagates: there is no other runner to go on with.
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
    results = group._worker_manager.foreach_actor(
        list(calls.values()),
        kwargs=[{}] * len(calls),
        remote_actor_ids=list(calls),
        healthy_only=False,
        timeout_seconds=timeout_s,
    )
    for result in results:
        if result.ok:
            replies.answers[result.actor_id] = result.get()
        else:
            replies.died.append(result.actor_id)
    replies.timed_out = sorted(set(calls) - set(replies.answers) - set(replies.died))
    return replies
