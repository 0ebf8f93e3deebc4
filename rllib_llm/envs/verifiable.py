"""Single-turn environments whose answers can be checked: a problem source, a prompt template, an extractor, rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from rllib_llm.envs.checks import Section
from rllib_llm.envs.extraction import AnswerExtractor
from rllib_llm.envs.prompts import PromptTemplate, Shot
from rllib_llm.envs.protocol import SPLITS, EnvConfigError, Prompt, Split, StepResult
from rllib_llm.envs.rewards import RewardComposer, RewardInput
from rllib_llm.envs.splits import split_of

# One GRPO group asks for the same problem G times; generation of a hard task costs milliseconds.
CACHED_PROBLEMS = 1024


@dataclass(frozen=True)
class Problem:
    """One question with its answer. `score(extracted)` is in [0, 1] and is judged correct when it is 1.

    info: for the log. values: the columns of its row in a file, for reward functions.
    """

    id: str
    question: str
    answer: str
    score: Callable[[str], float] = field(repr=False)
    info: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)


class VerifiableEnv:
    """One episode: a prompt, one completion, its reward. Made by a `VerifiableFactory`."""

    def __init__(self, factory: VerifiableFactory):
        self._factory = factory
        self._problem: Problem | None = None
        self._recorded = False

    def reset(self, index: int) -> Prompt:
        self._problem, self._recorded = self._factory.problem(index), False
        return self._factory.render(self._problem)

    def step(self, completion: str) -> StepResult:
        """`info`: correct (bool), extracted (str | None), id. Judging the same problem again (retry) is allowed."""
        if self._problem is None:
            raise RuntimeError("step() before reset(): an environment must be given a problem first")
        problem, factory = self._problem, self._factory
        extracted = factory.extract(completion)
        reward, rewards = factory.rewards(
            RewardInput(
                completion,
                extracted,
                problem.question,
                problem.answer,
                problem.id,
                problem.score,
                problem.info,
                problem.values,
            )
        )
        correct = (
            rewards["correctness"] == 1.0 if "correctness" in rewards else _is_correct(problem, extracted)
        )
        if not self._recorded:
            factory.record(problem, correct)
            self._recorded = True
        info: dict[str, Any] = {"correct": correct, "extracted": extracted}
        if factory.solved_at is not None:
            info["solved"] = reward >= factory.solved_at
        return StepResult(reward, True, "", rewards, info)


class VerifiableFactory(ABC):
    """Shared part of the adapters: reads the options common to all and serves problems of one split.

    Common options (`env.config`): `prompt` (see PromptTemplate), `answer` (see AnswerExtractor), `rewards` or `reward`
    (see RewardComposer), `solved_at` (the episode counts as solved from this reward on; null: where the answer is
    right), `split_seed` (0) and `eval_fraction` (0.2), which decide what problem is in which split. The run's
    `seed` only decides in which order they come.
    """

    default_answer: ClassVar[str] = "whole"

    def __init__(self, config: Mapping[str, Any], split: Split, seed: int):
        if split not in SPLITS:
            raise EnvConfigError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
        self.split, self.seed = split, seed
        section = Section(config, "env.config")
        for key in ("prompt", "answer", "rewards"):
            section.take(key, None, (dict, str, Mapping, type(None)))
        reward = section.take("reward", None, object)
        if reward is not None and config.get("rewards") is not None:
            section.problem("reward", "and rewards are both given: give one of them")
        self.template = section.include("prompt", lambda: PromptTemplate.from_config(config.get("prompt")))
        self.extract = section.include(
            "answer", lambda: AnswerExtractor.from_config(config.get("answer", self.default_answer))
        )
        self.rewards = section.include("rewards", lambda: _composer(config.get("rewards"), reward))
        self.split_seed: int = section.take("split_seed", 0, int)
        self.eval_fraction: float = section.take(
            "eval_fraction", 0.2, float, lambda v: 0 < v < 1, "a number in (0, 1)"
        )
        self.solved_at: float | None = section.take("solved_at", None, (float, type(None)))
        self.read_options(section)
        section.finish()
        self._problem = lru_cache(maxsize=CACHED_PROBLEMS)(self._make_cached)
        self._shots: tuple[Shot, ...] | None = None

    def __call__(self) -> VerifiableEnv:
        return VerifiableEnv(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is not sent between processes; call make_env() where it is needed"
        )

    @abstractmethod
    def read_options(self, section: Section) -> None:
        """Take the adapter's own keys from `section`, noting problems in it."""

    @abstractmethod
    def make_problem(self, index: int) -> Problem:
        """Problem `index` of this split, the same for the same index, seed and curriculum level."""

    @abstractmethod
    def draw_shots(self, count: int) -> tuple[Shot, ...]:
        """`count` examples from the training split, whichever split this is."""

    def problem(self, index: int) -> Problem:
        if index < 0:
            raise ValueError(f"reset({index}): a problem index is >= 0")
        return self._problem(index)

    def _make_cached(self, index: int) -> Problem:
        return self.make_problem(index)

    def forget_cached(self) -> None:
        """After a change of what an index means."""
        self._problem.cache_clear()

    @property
    def shots(self) -> tuple[Shot, ...]:
        if self._shots is None:
            count = self.template.few_shot
            self._shots = self.draw_shots(count) if isinstance(count, int) and count else ()
        return self._shots

    def in_split(self, question: str, split: Split | None = None) -> bool:
        """True if the question belongs to `split` (default: this one) and is not shown as an example."""
        if split_of(question, self.split_seed, self.eval_fraction) != (split or self.split):
            return False
        return split is not None or all(question != shot.question for shot in self.shots)

    def render(self, problem: Problem) -> Prompt:
        info = {"id": problem.id, "split": self.split, **problem.info}
        return self.template.render(problem.question, info, self.shots)

    def record(self, problem: Problem, correct: bool) -> None:  # noqa: B027 - a hook; most sources have no curriculum
        """Told the outcome of each first answer."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, got {sorted(state)}; was it saved by another env?"
            )

    @property
    def num_problems(self) -> int | None:
        return None


def _composer(rewards: Mapping[str, Any] | None, reward: Any) -> RewardComposer:
    return RewardComposer.from_config(rewards) if reward is None else RewardComposer.from_reward(reward)


def _is_correct(problem: Problem, extracted: str | None) -> bool:
    return extracted is not None and problem.score(extracted) == 1.0
