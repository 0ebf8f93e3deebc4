"""Calling functions that users wrote: sync or async, for one sample or a batch, and whatever they return or raise.

A reward function is `f(completion, answer, **row) -> float`. `row` holds the columns of the problem's row and
`question`, `problem` (its id) and `extracted`; a function takes those that it names, or all with `**row`. One with a
first parameter `completions` is a batch function, as TRL's: it gets lists and returns a list of floats. One with a
first parameter `sample` gets a `RewardInput`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from rllib_llm.envs.checks import EnvConfigError
from rllib_llm.envs.protocol import RewardError, describe_error

if TYPE_CHECKING:
    from rllib_llm.envs.rewards import RewardInput


def function_style(function: Callable[..., Any], path: object, where: str) -> str:
    """ "completion" for f(completion, …) and f(completions, …), else "sample". Raises `EnvConfigError`.

    A function that must have a parameter that no row can give is not refused here: rows differ.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "sample"
    if not parameters:
        raise EnvConfigError(
            f"{where}.function = {path!r} takes no argument: expected f(completion, answer, **row)"
        )
    first = parameters[0].name
    if parameters[0].kind is inspect.Parameter.VAR_KEYWORD or first in (
        "completion",
        "completions",
        "prompts",
    ):
        return "completion"
    return "completion" if any(p.name in ("completion", "completions") for p in parameters) else "sample"


def user_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a `RewardInput` that calls `function` with the arguments it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    batch = "completions" in parameters

    def call(sample: RewardInput, **options: Any) -> Any:
        given: dict[str, Any] = {
            **{str(key): value for key, value in sample.row.items()},
            "question": sample.question,
            "answer": sample.answer,
            "problem": sample.problem,
            "extracted": sample.extracted,
        }
        given |= {"prompts": sample.question, "completions": sample.completion} if batch else {}
        given |= {"completion": sample.completion} if not batch or "completion" in parameters else {}
        chosen = given if takes_all else {key: value for key, value in given.items() if key in parameters}
        if not batch:
            return function(**chosen, **options)
        return _first_of(function(**{key: [value] for key, value in chosen.items()}, **options))

    return call


async def _awaited_first(values: Any) -> Any:
    return _first_of(await values)


def _first_of(values: Any) -> Any:
    if inspect.isawaitable(values):
        return _awaited_first(values)
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise TypeError(
            f"a batch reward function returned {shown(values)}: expected a list, one number per completion"
        )
    if len(values) != 1:
        raise TypeError(f"a batch reward function returned {len(values)} numbers for 1 completion")
    return values[0]


def call_reward(name: str, problem: str, call: Callable[[], Any]) -> float:
    """The finite number that `call` returns, awaited if need be. Raises `RewardError` for anything else.

    What the function raises is caught whatever it is, sys.exit() too: it costs one sample. KeyboardInterrupt is not.
    """
    try:
        value = call()
        if inspect.isawaitable(value):
            value = run_async(_await(value))
        return as_number(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RewardError(name, problem, describe_error(error)) from error


async def _await(value: Any) -> Any:
    return await value


def as_number(value: Any, finite: bool = True) -> float:
    """`value` as float: a finite real number (bool, int, float, array of one). Raises TypeError saying what came."""
    if isinstance(value, (str, bytes)) or value is None or isinstance(value, Mapping):
        raise TypeError(f"returned {shown(value)}: expected a number, not {type(value).__name__}")
    if not isinstance(value, numbers.Real):
        item = getattr(value, "item", None)
        if not callable(item) or getattr(value, "size", 1) == 0:
            raise TypeError(f"returned {shown(value)}: expected a number, not {type(value).__name__}")
        value = item()  # of an array with one element; others raise
    number = float(value)
    if finite and not math.isfinite(number):
        raise TypeError(f"returned {number!r}, not a finite number")
    return number


def shown(value: object) -> str:
    """A value in a message: its repr in ASCII, cut."""
    try:
        text = ascii(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


class _Loop:
    """One event loop in a thread of its own, so that async functions work wherever the caller runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_contained(coroutine), self._loop).result()


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """SystemExit would end the loop's thread, and the caller would wait for ever."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(describe_error(error)) from None


_LOOP = _Loop()


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, computed in this process's own event loop."""
    return _LOOP.run(coroutine)
