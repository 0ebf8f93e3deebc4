"""Difficulty that follows success: a level per task, raised when the model solves enough of its problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_llm.envs.checks import Section


@dataclass(frozen=True)
class CurriculumConfig:
    """raise_at: share of correct answers in a window at which the level goes up by one.
    lower_at: share at which it goes down (0 = never, as a share is never below 0).
    window: answers that decide; after a decision counting starts anew.
    start, top: first and last level (reasoning-gym's own levels; top None = the last the task has).
    """

    raise_at: float = 0.8
    lower_at: float = 0.0
    window: int = 64
    start: int = 0
    top: int | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None, where: str = "env.config.curriculum"
    ) -> CurriculumConfig:
        section = Section(config, where)
        result = cls(
            raise_at=section.take("raise_at", 0.8, float, lambda v: 0 < v <= 1, "a share in (0, 1]"),
            lower_at=section.take("lower_at", 0.0, float, lambda v: 0 <= v < 1, "a share in [0, 1)"),
            window=section.take("window", 64, int, lambda v: v > 0, "an integer > 0"),
            start=section.take("start", 0, int, lambda v: v >= 0, "an integer >= 0"),
            top=section.take(
                "top", None, (int, type(None)), lambda v: v is None or v >= 0, "an integer >= 0 or null"
            ),
        )
        if result.lower_at >= result.raise_at:
            section.problem("lower_at", f"= {result.lower_at} must be below raise_at = {result.raise_at}")
        if result.top is not None and result.top < result.start:
            section.problem("top", f"= {result.top} is below start = {result.start}")
        section.finish()
        return result


@dataclass
class TaskProgress:
    """Level of one task and the answers counted since it last changed."""

    level: int
    asked: int = 0
    right: int = 0


@dataclass
class Curriculum:
    """Levels of several tasks. Answers to a level the task has left are not counted."""

    config: CurriculumConfig
    tops: dict[str, int]
    progress: dict[str, TaskProgress] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = {task: TaskProgress(min(self.config.start, top)) for task, top in self.tops.items()}

    def level(self, task: str) -> int:
        return self.progress[task].level

    def record(self, task: str, level: int, correct: bool) -> bool:
        """Count one answer; True if the task's level changed."""
        progress = self.progress[task]
        if level != progress.level:
            return False
        progress.asked += 1
        progress.right += correct
        if progress.asked < self.config.window:
            return False
        share, before = progress.right / progress.asked, progress.level
        if share >= self.config.raise_at:
            progress.level = min(self.tops[task], progress.level + 1)
        elif share < self.config.lower_at:
            progress.level = max(self.config.start, progress.level - 1)
        progress.asked = progress.right = 0
        return progress.level != before

    def get_state(self) -> dict[str, Any]:
        return {task: [p.level, p.asked, p.right] for task, p in self.progress.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the saved tasks are not these."""
        if set(state) != set(self.progress):
            raise ValueError(
                f"saved curriculum is of the tasks {sorted(state)}, this run has {sorted(self.progress)}"
            )
        for task, (level, asked, right) in state.items():
            if not 0 <= level <= self.tops[task]:
                raise ValueError(f"saved level {level} of task {task!r} is outside 0…{self.tops[task]}")
            self.progress[task] = TaskProgress(level, asked, right)
