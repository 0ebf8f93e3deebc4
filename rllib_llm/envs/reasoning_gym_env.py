"""Tasks of the library reasoning-gym: one, or a weighted mixture, with a curriculum if wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.curriculum import Curriculum, CurriculumConfig
from rllib_llm.envs.prompts import Shot
from rllib_llm.envs.protocol import EnvConfigError, Split
from rllib_llm.envs.reasoning_gym_tasks import POOLED, create_dataset, last_valid_level, refusal
from rllib_llm.envs.splits import rng_for
from rllib_llm.envs.verifiable import Problem, VerifiableFactory

# Candidates drawn before giving up on finding one of the right split: at eval_fraction 0.2 a miss has odds 0.8^2000.
MAX_DRAWS = 2000


@dataclass(frozen=True)
class MixtureTask:
    """One task of a mixture: its reasoning-gym configuration and how often it is asked, relative to the others."""

    name: str
    config: Mapping[str, Any]
    weight: float


class ReasoningGymTasks(VerifiableFactory):
    """Procedurally generated problems of reasoning-gym 0.1.25 with the library's own scorers.

    env_config: `task` and `task_config`, or `tasks`: [{task, task_config, weight}]; `partial_credit` (False: only a
    score of exactly 1 counts, because many scorers give about 0.01 to anything); `curriculum` (null or options of
    CurriculumConfig; training split only, evaluation stays at its start level); plus the options of VerifiableFactory.
    Tasks whose scorers execute what the model wrote are refused.
    """

    def read_options(self, section: Section) -> None:
        single = section.take("task", None, (str, type(None)))
        single_config = section.take("task_config", {}, Mapping)
        several = section.take("tasks", None, (list, tuple, type(None)))
        self.partial_credit: bool = section.take("partial_credit", False, bool)
        curriculum = section.take("curriculum", None, (Mapping, type(None)))
        if (single is None) == (several is None):
            section.problem("task", "or tasks must be given, exactly one of them (e.g. task: chain_sum)")
            return
        if several is not None and single_config:
            section.problem("task_config", "belongs to task; in a mixture give it inside each entry of tasks")
        entries = [{"task": single, "task_config": single_config}] if several is None else several
        self.tasks = _read_tasks(section, entries, several is not None)
        self._datasets: dict[tuple[int, int], Any] = {}
        self.curriculum: Curriculum | None = None
        if curriculum is not None:
            self._start_curriculum(section, curriculum)
        for position in range(len(self.tasks)):
            section.include("task", partial(self._dataset, position, self._level(self.tasks[position].name)))

    def _start_curriculum(self, section: Section, options: Mapping[str, Any]) -> None:
        config = section.include(
            "curriculum", lambda: CurriculumConfig.from_config(options), CurriculumConfig()
        )
        tops = {}
        for task in self.tasks:
            last = last_valid_level(task.name, task.config)
            if last is None:
                section.problem(
                    "curriculum", f"is not possible: reasoning-gym defines no levels for {task.name!r}"
                )
            elif max(config.start, config.top or 0) > last:
                section.problem(
                    "curriculum", f"= {dict(options)}: the highest level of {task.name!r} is {last}"
                )
            else:
                tops[task.name] = last if config.top is None else config.top
        if len(tops) == len(self.tasks):
            self.curriculum = Curriculum(config, tops)

    def _level(self, task: str) -> int | None:
        if self.curriculum is None:
            return None
        return self.curriculum.level(task) if self.split == "train" else self.curriculum.config.start

    def _dataset(self, position: int, level: int | None) -> Any:
        key = (position, -1 if level is None else level)
        if key not in self._datasets:
            task = self.tasks[position]
            self._datasets[key] = create_dataset(task.name, task.config, level)
        return self._datasets[key]

    def make_problem(self, index: int) -> Problem:
        return self._draw(("problem", self.seed, index), None)

    def _draw(self, key: tuple[Any, ...], split: Split | None) -> Problem:
        """First problem of the stream named by `key` that belongs to `split` (default: this factory's)."""
        rng = rng_for(*key)
        position = rng.choices(range(len(self.tasks)), [task.weight for task in self.tasks])[0]
        task = self.tasks[position]
        level = self._level(task.name)
        dataset = self._dataset(position, level)
        for _ in range(MAX_DRAWS):
            number = rng.randrange(
                POOLED.get(task.name, 2**31)
            )  # an item's seed; some tasks hand it to numpy: 31 bits
            entry = dataset[number]
            if self.in_split(entry["question"], split):
                info = {"task": task.name} | ({} if level is None else {"level": level})
                return Problem(
                    f"{task.name}/{number}",
                    entry["question"],
                    entry["answer"],
                    partial(self._score, dataset, entry),
                    info,
                )
        raise EnvConfigError(
            f"task {task.name!r} with {dict(task.config)} gave no problem of the {split or self.split} split in "
            f"{MAX_DRAWS} draws: it has too few distinct problems. Make it harder (task_config), change eval_fraction "
            f"= {self.eval_fraction} or split_seed = {self.split_seed}"
        )

    def _score(self, dataset: Any, entry: dict[str, Any], answer: str) -> float:
        score = float(dataset.score_answer(answer, entry))
        return score if self.partial_credit else float(score == 1.0)

    def draw_shots(self, count: int) -> tuple[Shot, ...]:
        """Examples depend on split_seed, not on the run's seed: a prompt is part of the task."""
        shots: list[Shot] = []
        for number in range(100 * count):
            problem = self._draw(("shot", self.split_seed, number), "train")
            if all(problem.question != shot.question for shot in shots):
                shots.append(Shot(problem.question, problem.answer))
            if len(shots) == count:
                return tuple(shots)
        raise EnvConfigError(
            f"env.config.prompt.few_shot = {count}: the task has too few distinct training problems"
        )

    def record(self, problem: Problem, correct: bool) -> None:
        if self.curriculum is None or self.split != "train":
            return
        if self.curriculum.record(problem.info["task"], problem.info["level"], correct):
            self.forget_cached()

    def get_state(self) -> dict[str, Any]:
        return {} if self.curriculum is None else {"curriculum": self.curriculum.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.curriculum is None:
            super().set_state(state)
            return
        self.curriculum.set_state(state["curriculum"])
        self.forget_cached()


def _read_tasks(section: Section, entries: Any, is_mixture: bool) -> tuple[MixtureTask, ...]:
    tasks: list[MixtureTask] = []
    for number, entry in enumerate(entries):
        part = Section(entry, f"{section.where}.tasks[{number}]" if is_mixture else section.where)
        name = part.take("task", None, str)
        config = part.take("task_config", {}, Mapping)
        weight = part.take("weight", 1.0, float, lambda v: 0 < v < float("inf"), "a number > 0")
        if name is None:
            part.problem("task", "is missing")
        elif (reason := refusal(name)) is not None:
            part.problem("task", f"= {name!r}: {reason}")
        elif any(task.name == name for task in tasks):
            part.problem("task", f"= {name!r} is there twice; give it once with the sum of the weights")
        else:
            tasks.append(MixtureTask(name, dict(config), weight))
        section.include("tasks", part.finish)
    if not entries:
        section.problem("tasks", "is empty")
    return tuple(tasks)
