"""Calling an environment that somebody else wrote: with a time limit, and with what it returns checked."""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rllib_llm.envs.protocol import Prompt, StepResult
from rllib_llm.envs.reward_calls import as_number, run_async, shown
from rllib_llm.errors import RllibLLMError

T = TypeVar("T")


class EnvTimeoutError(RllibLLMError, RuntimeError):
    """A call of an environment took longer than env.step_timeout_s."""


class EnvCaller:
    """Calls functions in one thread, so that the caller can stop waiting.

    timeout_s: None calls them in the caller's own thread and waits for ever. A thread cannot be ended: the one that
    hangs is left behind (a daemon) and another takes its place. Code that never gives Python's global lock back, as one
    endless regular expression, cannot be left behind; where runners are processes, rollout.sample_timeout_s ends it.

    After `max_hung` calls that hang, every further call fails at once: a broken environment costs an iteration minutes,
    not hours. `forgive` starts the count anew.
    """

    def __init__(self, timeout_s: float | None, max_hung: int = 4):
        self.timeout_s, self.max_hung, self.hung = timeout_s, max_hung, 0
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] | None = None

    def forgive(self) -> None:
        self.hung = 0

    def __call__(self, what: str, call: Callable[[], T]) -> T:
        """What `call` returns, awaited if need be. Raises what it raises, or `EnvTimeoutError` naming `what`."""
        if self.timeout_s is None:
            return _finished(call)
        if self.hung >= self.max_hung:
            raise EnvTimeoutError(f"{what} was not called: {self.hung} calls before it hung")
        if self._work is None:
            self._work = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._work,), name="text env", daemon=True).start()
        reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work.put((lambda: _finished(call), reply))
        try:
            value, error = reply.get(timeout=self.timeout_s)
        except queue.Empty:
            self._work.put(None)  # ends the thread should the call ever return
            self._work, self.hung = None, self.hung + 1
            raise EnvTimeoutError(
                f"{what} took longer than env.step_timeout_s = {self.timeout_s:g} s and is left behind"
            ) from None
        if error is not None:
            raise error
        result: T = value
        return result

    def close(self) -> None:
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _serve(work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]) -> None:
    while (item := work.get()) is not None:
        call, reply = item
        try:
            reply.put((call(), None))
        except BaseException as error:  # the caller decides, of SystemExit too
            reply.put((None, error))


def _finished(call: Callable[[], Any]) -> Any:
    value = call()
    return run_async(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def as_prompt(value: Any) -> Prompt:
    """What reset() returned as a `Prompt`: itself, a text, or a list of messages. Raises TypeError saying what came."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str):
        return Prompt(text=value)
    expected = "expected a str, a list of {'role': …, 'content': …} or a rllib_llm.envs.Prompt"
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise TypeError(f"reset() returned {shown(value)}: {expected}")
    for message in value:
        fields = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in fields):
            raise TypeError(
                f"reset() returned a message {shown(message)}: {expected}, with texts in both fields"
            )
    return Prompt(messages=[dict(message) for message in value])


def checked_step(result: Any) -> StepResult:
    """What step() returned, its parts as Python's types. Raises TypeError saying what came and what is expected."""
    if not isinstance(result, StepResult):
        raise TypeError(
            f"step() returned {shown(result)}: expected a rllib_llm.envs.StepResult(reward=…, done=…)"
        )
    if not isinstance(result.done, (bool, np.bool_)):
        raise TypeError(f"StepResult.done = {shown(result.done)}: expected True or False")
    if not isinstance(result.observation, str):
        raise TypeError(f"StepResult.observation = {shown(result.observation)}: expected a str")
    for name, value in (("rewards", result.rewards), ("info", result.info)):
        if not isinstance(value, Mapping):
            raise TypeError(f"StepResult.{name} = {shown(value)}: expected a mapping")
    rewards = {str(name): _number(f"reward {name!r}", value) for name, value in result.rewards.items()}
    reward = _number("StepResult.reward", result.reward)
    return StepResult(reward, bool(result.done), result.observation, rewards, dict(result.info))


def _number(what: str, value: Any) -> float:
    try:
        return as_number(value, finite=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is no number: {error}") from None
