"""Problems with answers from a file (GSM8K, MATH, your own), compared as numbers, mathematics or text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.comparison import COMPARE, kind_of
from rllib_llm.envs.extraction import AnswerExtractor
from rllib_llm.envs.math_checker import MathChecker, shared_checker
from rllib_llm.envs.problem_index import MESSAGES_SHOWN, ProblemIndex, Row, RowFormat, read_problems
from rllib_llm.envs.prompts import Shot
from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.envs.rewards import correctness
from rllib_llm.envs.splits import rng_for, split_of
from rllib_llm.envs.verifiable import Problem, VerifiableFactory

COLUMNS = ("question", "answer", "compare")


class JsonlMath(VerifiableFactory):
    """Problems {"prompt"|"question"|"problem": …, "answer": …} of a JSONL, Parquet or `datasets` file, answers checked.

    env_config: `path`; `eval_path` (a file of its own for evaluation; it must share no problem with `path`; without it
    the file is split by `eval_fraction`); `columns` ({question, answer, compare}: names of columns, "a.b" for a nested
    field); `answer_after` ("####" in GSM8K: the final answer is what follows it in the file's answer text); `compare`
    (auto, math, number, text: how answers are compared, see `comparison`; a row's own column `compare` comes first);
    `duplicates` (drop or refuse identical rows); `timeout_s` (5.0) for one comparison; plus the options of
    VerifiableFactory. Every row that cannot be used, or whose own answer would not be paid, is reported before anything
    runs.
    """

    default_answer = "last_number"

    def read_options(self, section: Section) -> None:
        path = section.take("path", None, str)
        eval_path = section.take("eval_path", None, (str, type(None)))
        after = section.take(
            "answer_after", None, (str, type(None)), lambda v: v != "", "a non-empty string or null"
        )
        columns = section.include("columns", lambda: _columns(section.take("columns", {}, Mapping)), {})
        compare = section.choice("compare", "auto", COMPARE)
        duplicates = section.choice("duplicates", "drop", ("drop", "refuse"))
        seconds = section.take("timeout_s", 5.0, float, lambda v: v > 0, "a number of seconds > 0")
        if path is None:
            section.problem("path", "is missing: the JSONL file with the problems")
            return
        checker: MathChecker | None = section.include("timeout_s", lambda: shared_checker(seconds))
        if checker is None or self.extract is None:
            return
        self._equal = checker.equal
        self.path = path
        # Only "correctness" compares the answers of the file; other rewards may use its rows as they like.
        judged = (
            any(reward.function is correctness for reward in self.rewards.rewards) if self.rewards else True
        )
        names = {"answer": "answer", "compare": "compare"} | columns
        form = RowFormat(names.get("question"), names["answer"], names["compare"], compare, after, judged)

        def read(file: str) -> ProblemIndex:
            # Both splits of an environment, and all environments of a process, read a file once.
            key = (form, self.extract, duplicates, seconds, self.split_seed, self.eval_fraction)
            return _read(Path(file), _stamp(Path(file)), *key)

        index = section.include("path", lambda: read(path))
        if index is None:
            return
        self._train_index = self._eval_index = index
        if eval_path is None:
            self._train, self._eval = index.positions(True), index.positions(False)
        else:
            other = section.include("eval_path", lambda: read(eval_path))
            if other is None:
                return
            self._eval_index = other
            section.include("eval_path", lambda: refuse_overlap(index, other, path, eval_path))
            self._train, self._eval = (array("Q", range(len(rows))) for rows in (index, other))
        if not (len(self._train) and len(self._eval)):
            section.problem(
                "path",
                f"= {path!r}: {len(index)} problems leave {len(self._train)} for training and {len(self._eval)} for "
                f"evaluation; change eval_fraction or split_seed, or give eval_path",
            )

    def _row(self, split: str, position: int) -> Row:
        return (self._train_index if split == "train" else self._eval_index).row(position)

    @cached_property
    def positions(self) -> array[int]:
        """Rows of this split, without those shown as examples."""
        positions = self._train if self.split == "train" else self._eval
        shown = {shot.question for shot in self.shots}
        if not shown:
            return positions
        return array("Q", (p for p in positions if self._row(self.split, p).question not in shown))

    def make_problem(self, index: int) -> Problem:
        """Evaluation goes through the file in order; training through a new shuffle in each pass."""
        count = len(self.positions)
        if not count:
            raise EnvConfigError(
                f"{self.path}: all problems of the {self.split} split are shown as few-shot examples"
            )
        epoch, place = divmod(index, count)
        if self.split == "train":
            place = self._order(epoch)[place]
        row = self._row(self.split, self.positions[place])
        score: Callable[[str], float] = partial(_score, self._equal, row.answer, row.compare)
        path = Path(self.path)
        info = {"task": path.stem, "compare": kind_of(row.answer, row.compare)}
        return Problem(f"{path.name}:{row.line}", row.question, row.answer, score, info, row.values or {})

    @cached_property
    def _order(self) -> Callable[[int], array[int]]:
        @lru_cache(maxsize=2)
        def order(epoch: int) -> array[int]:
            places = list(range(len(self.positions)))
            rng_for("epoch", self.seed, epoch).shuffle(places)
            return array("Q", places)

        return order

    def draw_shots(self, count: int) -> tuple[Shot, ...]:
        if count >= len(self._train):
            raise EnvConfigError(
                f"env.config.prompt.few_shot = {count}: {self.path} has {len(self._train)} training problems"
            )
        chosen = rng_for("shots", self.split_seed).sample(self._train, count)
        rows = [self._train_index.row(position) for position in chosen]
        return tuple(Shot(row.question, row.solution) for row in rows)

    @property
    def num_problems(self) -> int:
        return len(self.positions)


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of what is at `path`; () where nothing can be looked at (reading says why)."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _read(
    path: Path,
    stamp: tuple[tuple[str, int, int], ...],
    form: RowFormat,
    extract: AnswerExtractor,
    duplicates: str,
    seconds: float,
    split_seed: int,
    eval_fraction: float,
) -> ProblemIndex:
    def in_training(question: str) -> bool:
        return split_of(question, split_seed, eval_fraction) == "train"

    equal = shared_checker(seconds).equal
    return read_problems(path, form, extract.written, extract, equal, duplicates, in_training)


def _columns(values: Mapping[str, Any]) -> dict[str, str]:
    section = Section(values, "env.config.columns")
    columns = {key: section.take(key, None, str, bool, "the name of a column") for key in COLUMNS}
    section.finish()
    return {key: name for key, name in columns.items() if name is not None}


def _score(equal: Callable[[str, str, str], bool], gold: str, compare: str, answer: str) -> float:
    return float(equal(gold, answer, compare))


def refuse_overlap(train: ProblemIndex, evaluation: ProblemIndex, train_path: str, eval_path: str) -> None:
    """Raises `EnvConfigError` listing the lines of problems that are in both files."""
    shared = evaluation.shared_lines(train)
    if shared:
        pairs = ", ".join(f"{e}={t}" for e, t in shared[:MESSAGES_SHOWN])
        raise EnvConfigError(
            f"env.config.eval_path = {eval_path!r} shares {len(shared)} problems with path = {train_path!r} "
            f"(eval line=train line: {pairs}); remove them from one of the files"
        )
