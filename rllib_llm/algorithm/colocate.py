"""One GPU for learner and engines: engines give their memory back while the learner computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.errors import RllibLLMError

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

__all__ = ["EngineSleepError", "asleep"]


class EngineSleepError(RllibLLMError, RuntimeError):
    """Some engine did not give its memory back, or did not wake; names the env runners."""


@contextmanager
def asleep(groups: Sequence[EnvRunnerGroup | None], timeout_s: float) -> Iterator[None]:
    """Engines of all runners of `groups` sleep (level 1: weights parked in host memory) inside the block.

    A runner that dies meanwhile is left to RLlib's recovery: it comes back awake.

    Raises:
        EngineSleepError: lists each runner that refused or did not answer within `timeout_s` seconds.
    """
    present = [group for group in groups if group is not None]
    _call(present, _sleep, timeout_s, "sleep")
    try:
        yield
    finally:
        _call(present, _wake, timeout_s, "wake")


def _call(groups: Sequence[EnvRunnerGroup], call: Any, timeout_s: float, what: str) -> None:
    problems = []
    for group in groups:
        replies = call_runners(group, call, timeout_s=timeout_s)
        problems += [f"env runner {i}: no answer within {timeout_s:.0f} s" for i in replies.timed_out]
        problems += [
            f"env runner {i}: {reply.error.strip().splitlines()[-1]}"
            for i, reply in replies.answers.items()
            if reply.error is not None
        ]
    if problems:
        raise EngineSleepError(f"engines did not {what}:\n  " + "\n  ".join(problems))


def _sleep(runner: Any) -> Any:
    return runner.sleep_reply()


def _wake(runner: Any) -> Any:
    return runner.wake_reply()
