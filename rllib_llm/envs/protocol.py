"""What an environment is: text in, reward out.

A `TextEnv` holds one episode. The env runner asks `factory()` for as many environments as it plays at the same
time, calls `reset(index)` on each (the same index for the members of one GRPO group), lets the engine write a
completion, and hands it to `step`. `StepResult.done == False` means another turn: `observation` is what the
environment writes into the context before the model writes again. Those tokens are never trained on.

Environments see text, never tokens: what a token is, is the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from rllib_llm.errors import InputError, RllibLLMError

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
Message = dict[str, str]


class EnvConfigError(RllibLLMError, InputError, ValueError):
    """An environment's configuration is wrong; the message lists every key that is, and what to write instead."""


def describe_error(error: BaseException) -> str:
    """ "KeyError: 'x'", also of an exception whose own text raises."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text cannot be shown: {type(broken).__name__})"
    return f"{type(error).__name__}: {text}"


class RewardError(RllibLLMError, RuntimeError):
    """A reward function raised. It costs this sample, never the run: the env runner counts it and drops the sample.

    Attributes: `reward` (the name the config gives it), `problem` (the problem's id); `__cause__` is the original.
    """

    def __init__(self, reward: str, problem: str, cause: BaseException | str):
        self.reward, self.problem = reward, problem
        self.cause = cause if isinstance(cause, str) else describe_error(cause)
        super().__init__(
            f"reward {reward!r} raised {self.cause} on problem {problem}. The sample is dropped and counted; "
            f"make the function return a number for every string a model can write"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reward, self.problem, self.cause)


@dataclass(frozen=True)
class Prompt:
    """What the model is shown first: plain `text`, or chat `messages` for the tokenizer's chat template. Never both.

    `info` describes the problem (JSON-able): `id`, `task`, `level`, `split` in the adapters shipped here.
    """

    text: str | None = None
    messages: list[Message] | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError("Prompt takes either text= or messages=, exactly one of them")


@dataclass(frozen=True)
class StepResult:
    """One answer of the environment.

    reward: the number GRPO sees, the weighted sum of `rewards`; the return of an episode is the sum over its steps.
    rewards: each named reward, unweighted, for the log; `reward` must not be recomputed from it.
    observation: text the environment appends when `done` is False (rendered as a user turn for chat prompts).
    info: JSON-able facts about the step (`correct`, `extracted`, …).
    """

    reward: float
    done: bool
    observation: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class TextEnv(Protocol):
    """One episode at a time. A user's class needs these two methods, nothing else."""

    def reset(self, index: int) -> Prompt:
        """Start problem `index` (>= 0, unbounded): same index, split and seed give the same problem."""
        ...

    def step(self, completion: str) -> StepResult:
        """Judge what the model wrote. Raises `RewardError` when a reward function does."""
        ...


@runtime_checkable
class TextEnvFactory(Protocol):
    """Makes environments that share one problem source and, where there is one, one curriculum."""

    def __call__(self) -> TextEnv: ...

    def get_state(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint must keep (curriculum levels and counts; nothing for stateless sources)."""
        ...

    def set_state(self, state: dict[str, Any]) -> None: ...

    @property
    def num_problems(self) -> int | None:
        """Distinct problems in this split, None when they are generated without end."""
        ...
