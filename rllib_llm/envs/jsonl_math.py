"""Problems with answers from a JSONL file (GSM8K, MATH, your own), checked by math-verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.math_checker import shared_checker
from rllib_llm.envs.prompts import Shot
from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.envs.splits import normalise, rng_for
from rllib_llm.envs.verifiable import Problem, VerifiableFactory

QUESTION_KEYS = ("prompt", "question", "problem")
MESSAGES_SHOWN = 50


@dataclass(frozen=True)
class Row:
    """One line of the file; `line` counts from 1. `solution` is the whole answer text, `answer` its final answer."""

    line: int
    question: str
    solution: str
    answer: str


class JsonlMath(VerifiableFactory):
    """Problems {"prompt"|"question"|"problem": …, "answer": …} of a JSONL file, answers compared by math-verify.

    env_config: `path`; `eval_path` (a file of its own for evaluation; it must share no problem with `path`; without it
    the file is split by `eval_fraction`); `answer_after` ("####" in GSM8K: the final answer is what follows it in the
    file's answer text); `timeout_s` (5.0) for one comparison; plus the options of VerifiableFactory.
    Every malformed line is reported, with its number, before anything runs.
    """

    default_answer = "last_number"

    def read_options(self, section: Section) -> None:
        path = section.take("path", None, str)
        eval_path = section.take("eval_path", None, (str, type(None)))
        after = section.take(
            "answer_after", None, (str, type(None)), lambda v: v != "", "a non-empty string or null"
        )
        seconds = section.take("timeout_s", 5.0, float, lambda v: v > 0, "a number of seconds > 0")
        if path is None:
            section.problem("path", "is missing: the JSONL file with the problems")
            return
        self._equal = section.include("timeout_s", lambda: shared_checker(seconds).equal)
        self.path = path
        rows = section.include("path", lambda: read_jsonl(Path(path), after), [])
        if eval_path is None:
            self._train = [row for row in rows if self.in_split_of_file(row, "train")]
            self._eval = [row for row in rows if self.in_split_of_file(row, "eval")]
        else:
            self._train, self._eval = (
                rows,
                section.include("eval_path", lambda: read_jsonl(Path(eval_path), after), []),
            )
            section.include("eval_path", lambda: refuse_overlap(rows, self._eval, path, eval_path))
        if rows and not (self._train and self._eval):
            section.problem(
                "path",
                f"= {path!r}: {len(rows)} problems leave {len(self._train)} for training and {len(self._eval)} for "
                f"evaluation; change eval_fraction or split_seed, or give eval_path",
            )

    def in_split_of_file(self, row: Row, split: Any) -> bool:
        return super().in_split(row.question, split)

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of this split, without those shown as examples."""
        shown = {shot.question for shot in self.shots}
        return [
            row for row in (self._train if self.split == "train" else self._eval) if row.question not in shown
        ]

    def make_problem(self, index: int) -> Problem:
        """Evaluation goes through the file in order; training through a new shuffle in each pass."""
        rows = self.rows
        if not rows:
            raise EnvConfigError(
                f"{self.path}: all problems of the {self.split} split are shown as few-shot examples"
            )
        epoch, position = divmod(index, len(rows))
        if self.split == "train":
            position = self._order(epoch, len(rows))[position]
        row = rows[position]
        score: Callable[[str], float] = partial(_score, self._equal, row.answer)
        path = Path(self.path)
        return Problem(f"{path.name}:{row.line}", row.question, row.answer, score, {"task": path.stem})

    def _order(self, epoch: int, count: int) -> Sequence[int]:
        order = list(range(count))
        rng_for("epoch", self.seed, epoch).shuffle(order)
        return order

    def draw_shots(self, count: int) -> tuple[Shot, ...]:
        if count >= len(self._train):
            raise EnvConfigError(
                f"env_config.prompt.few_shot = {count}: {self.path} has {len(self._train)} training problems"
            )
        chosen = rng_for("shots", self.split_seed).sample(self._train, count)
        return tuple(Shot(row.question, row.solution) for row in chosen)

    @property
    def num_problems(self) -> int:
        return len(self.rows)


def _score(equal: Callable[[str, str], bool], gold: str, answer: str) -> float:
    return float(equal(gold, answer))


def read_jsonl(path: Path, answer_after: str | None = None) -> list[Row]:
    """Rows of a JSONL file; blank lines are skipped, a repeated question is an error (it may have two answers).

    Raises `EnvConfigError` naming every malformed line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvConfigError(f"env_config: cannot read {path.absolute()}: {error}") from error
    rows: list[Row] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _row(number, line, answer_after)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        first = seen.setdefault(normalise(row.question), number)
        if first != number:
            problems.append(f"line {number}: the same question as line {first}")
        rows.append(row)
    if not rows and not problems:
        problems.append("no problem in it")
    if problems:
        more = [f"… and {len(problems) - MESSAGES_SHOWN} more"] if len(problems) > MESSAGES_SHOWN else []
        raise EnvConfigError(
            "\n".join([f"{path}: {len(problems)} malformed:", *problems[:MESSAGES_SHOWN], *more])
        )
    return rows


def _row(number: int, line: str, answer_after: str | None) -> Row:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(item, dict):
        raise ValueError(f"expected an object, got {type(item).__name__}")
    keys = [key for key in QUESTION_KEYS if key in item]
    if len(keys) != 1:
        raise ValueError(
            f"needs exactly one of {', '.join(QUESTION_KEYS)}; has {', '.join(sorted(item)) or 'nothing'}"
        )
    question, solution = item[keys[0]], item.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{keys[0]!r} must be a non-empty string, got {question!r}")
    if isinstance(solution, bool) or not isinstance(solution, (str, int, float)) or not str(solution).strip():
        raise ValueError(f"'answer' must be a non-empty string or a number, got {solution!r}")
    final = str(solution)
    if answer_after is not None:
        _, marker, final = final.rpartition(answer_after)
        if not marker or not final.strip():
            raise ValueError(f"'answer' has nothing after {answer_after!r}")
    return Row(number, question, str(solution), final.strip())


def refuse_overlap(train: Sequence[Row], evaluation: Sequence[Row], train_path: str, eval_path: str) -> None:
    """Raises `EnvConfigError` listing the lines of problems that are in both files."""
    known = {normalise(row.question): row.line for row in train}
    shared = [
        (row.line, known[normalise(row.question)]) for row in evaluation if normalise(row.question) in known
    ]
    if shared:
        pairs = ", ".join(f"{e}={t}" for e, t in shared[:MESSAGES_SHOWN])
        raise EnvConfigError(
            f"env_config.eval_path = {eval_path!r} shares {len(shared)} problems with path = {train_path!r} "
            f"(eval line=train line: {pairs}); remove them from one of the files"
        )
