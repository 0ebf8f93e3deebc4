"""Environments that users write: what they may return, and what they do wrong costs samples, not the run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from rllib_llm.engines.base import Completion, SamplingParams
from rllib_llm.envs import Prompt, StepResult
from rllib_llm.envs.calls import EnvCaller, EnvTimeoutError, as_prompt, checked_step
from rllib_llm.rollout.play import play
from tests.envs.helpers import Unprintable

FOREVER = threading.Event()


class Digits:
    """An encoder and an engine in one: every answer is the token 7, the text of any ids their digits."""

    max_model_len = 64

    def generate(self, prompts: Any, params: SamplingParams, seeds: Any) -> list[list[Completion]]:
        one = Completion(np.array([7]), np.zeros(1, np.float32), "stop", 1)
        return [[one] * params.n for _ in prompts]

    def encode(self, prompt: Prompt) -> list[int]:
        text = prompt.text if prompt.messages is None else "".join(m["content"] for m in prompt.messages)
        return [len(text or "")]

    def encode_observation(self, text: str, is_chat: bool, completion_ids: Any) -> list[int]:
        return [1] * len(text)

    def decode(self, token_ids: Any) -> str:
        return "".join(map(str, token_ids))

    def unknown(self, token_ids: Any) -> int:
        return 0


class Env:
    """Does for problem i what the i-th entry of `reset` and `step` says."""

    def __init__(self, reset: Any = None, step: Any = None) -> None:
        self._reset, self._step, self.index = reset or {}, step or {}, 0

    def reset(self, index: int) -> Any:
        self.index = index
        return _done(self._reset.get(index, "a question"))

    def step(self, completion: str) -> Any:
        return _done(self._step.get(self.index, StepResult(1.0, True, info={"solved": completion == "7"})))


def _done(what: Any) -> Any:
    if isinstance(what, type) and issubclass(what, BaseException):
        raise what
    return what() if callable(what) else what


def run(problems: int, timeout_s: float | None = None, **env: Any) -> tuple[list[int], Any]:
    """Problems of which an episode came back, and the counters."""
    model = Digits()
    episodes, stats = play(
        model,
        model,
        lambda: Env(**env),
        range(problems),
        SamplingParams(n=1),
        max_turns=3,
        max_context=64,
        max_prompt_tokens=None,
        seed=lambda *_: 0,
        on_event=lambda *_: None,
        call_env=EnvCaller(timeout_s),
        where="env runner 5",
    )
    return [episode.group_id for episode in episodes], stats


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
BAD_PROMPTS = [
    None,
    5,
    "",
    [],
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": 1}],
    b"x",
    {"text": "x"},
    KeyError,
    SystemExit,
    Unprintable,
]
BAD_STEPS = [
    None,
    1.0,
    (1.0, True),
    {"reward": 1},
    StepResult("1.0", True),
    StepResult(1.0, "no"),
    StepResult(1.0, 1),
    StepResult(None, True),
    StepResult([1.0], True),
    StepResult(1.0, False, observation=None),
    StepResult(1.0, True, rewards={"a": "1"}),
    StepResult(1.0, True, rewards=[1]),
    StepResult(1.0, True, info=None),
    StepResult(float("nan"), True),
    KeyError,
    SystemExit,
    GeneratorExit,
    Unprintable,
]


@pytest.mark.parametrize("prompt", ["text", MESSAGES, tuple(MESSAGES), Prompt(text="text")])
def test_reset_may_return_a_text_or_messages(prompt):
    """A str is a text prompt, a list of messages a chat."""
    assert run(1, reset={0: prompt})[0] == [0]
    assert as_prompt("text") == Prompt(text="text")
    assert as_prompt(MESSAGES) == Prompt(messages=MESSAGES)


@pytest.mark.parametrize("timeout_s", [None, 60.0], ids=["same thread", "with a limit"])
@pytest.mark.parametrize("bad", [b for b in BAD_PROMPTS if b != ""], ids=ascii)
def test_a_prompt_that_is_none_costs_its_problem(bad, timeout_s):
    """Whatever reset() returns or raises, the other problems are played."""
    played, stats = run(3, timeout_s, reset={1: bad})
    assert (played, stats.errors) == ([0, 2], 1)
    assert "problem 1 is left out" in stats.last_error
    assert stats.last_error.endswith("(env runner 5)")


@pytest.mark.parametrize("timeout_s", [None, 60.0], ids=["same thread", "with a limit"])
@pytest.mark.parametrize("bad", BAD_STEPS, ids=ascii)
def test_a_step_that_is_none_costs_its_episode(bad, timeout_s):
    """Whatever step() returns or raises, the other episodes are kept, and the log names runner and problem."""
    played, stats = run(3, timeout_s, step={1: bad})
    assert (played, stats.errors) == ([0, 2], 1)
    assert "an episode of problem 1 is dropped" in stats.last_error
    assert stats.last_error.endswith("(env runner 5)")


@pytest.mark.parametrize("result", [1.0, (1.0, True), StepResult("1.0", True), StepResult(1.0, "no")])
def test_a_wrong_result_is_told_what_was_expected(result):
    """The message shows what came, and what should."""
    with pytest.raises(TypeError, match="expected"):
        checked_step(result)


def test_numpy_values_are_taken():
    """Rewards and flags of numpy are what Python's are."""
    step = checked_step(StepResult(np.float32(0.5), np.bool_(True), rewards={"a": np.int64(1)}))
    assert (step.reward, step.done, step.rewards) == (0.5, True, {"a": 1.0})


async def _later() -> StepResult:
    return StepResult(0.5, True)


def test_step_may_be_async():
    """A coroutine is awaited."""
    assert run(1, step={0: _later})[0] == [0]


def test_a_step_that_hangs_is_left_behind():
    """One endless step() costs its episode after the limit; the rest is played in another thread."""
    played, stats = run(3, 3.0, step={1: FOREVER.wait})
    assert (played, stats.errors) == ([0, 2], 1)
    assert "step() took longer than env.step_timeout_s = 3 s" in stats.last_error


def test_a_reset_that_hangs_is_left_behind():
    """The same for reset()."""
    played, stats = run(2, 3.0, reset={0: FOREVER.wait})
    assert (played, stats.errors) == ([1], 1)


def test_an_environment_that_always_hangs_costs_only_a_few_limits():
    """After `max_hung` hanging calls none is made any more, until it is forgiven."""
    caller = EnvCaller(0.05, max_hung=2)
    calls = []

    def hang() -> None:
        calls.append(1)
        FOREVER.wait()

    for _ in range(5):
        with pytest.raises(EnvTimeoutError):
            caller("step()", hang)
    assert len(calls) == 2
    caller.forgive()
    caller.timeout_s = 60.0
    assert caller("step()", lambda: 1) == 1


def test_calls_are_made_in_one_thread():
    """An environment may hold what only its thread may use, a database connection for example."""
    caller = EnvCaller(60.0)
    threads = {caller("reset()", threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


@pytest.mark.parametrize(
    ("info", "share"),
    [
        ({"solved": True}, 1.0),
        ({"correct": False}, 0.0),
        ({"solved": False, "correct": True}, 0.0),
        ({}, None),
    ],
)
def test_solved_share_is_what_the_environment_says(info, share):
    """info["solved"], else info["correct"], else nothing; whatever the reward is."""
    model = Digits()
    (episode,), _ = play(
        model,
        model,
        lambda: Env(step={0: StepResult(5.0, True, info=info)}),
        [0],
        SamplingParams(n=1),
        max_turns=1,
        max_context=64,
        max_prompt_tokens=None,
        seed=lambda *_: 0,
        on_event=lambda *_: None,
    )
    assert episode.metrics().get("solved_share") == share
