"""Reading a file of problems once: each row checked against the way its answer will be read, repeated rows found.

In memory stay 25 bytes a row; the rows themselves are read again when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_llm.envs.comparison import COMPARE, kind_of
from rllib_llm.envs.problem_files import JsonNumber, ProblemSource, Record, RowError, open_source
from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.envs.splits import normalise

logger = logging.getLogger(__name__)

QUESTION_KEYS = ("prompt", "question", "problem")
MESSAGES_SHOWN = 50
_NOT_FINITE = frozenset(("nan", "inf", "infinity"))


@dataclass(frozen=True)
class Row:
    """One problem. line: its number in the file from 1. solution: the whole answer text, answer: its final answer.

    compare: how the answer is compared ("auto", "math", "number", "text"), from the row or from the configuration.
    values: all columns, for reward functions.
    """

    line: int
    question: str
    solution: str
    answer: str
    compare: str = "auto"
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RowFormat:
    """Which columns hold what, and how an answer is compared.

    question, answer, compare: names of columns, "a.b" for a field of a nested one; question None: the one of "prompt",
    "question", "problem" that is there. answer_after: the final answer is what follows the last such marker. judged:
    the answer is compared with the model's; if not, it may be anything or missing.
    """

    question: str | None = None
    answer: str = "answer"
    compare_column: str = "compare"
    compare: str = "auto"
    answer_after: str | None = None
    judged: bool = True

    def row(self, number: int, item: Record) -> Row:
        """Raises `RowError` saying what is wrong with the row."""
        name, question = self._question(item)
        if not isinstance(question, str) or isinstance(question, JsonNumber) or not question.strip():
            raise RowError(f"{name!r} must be a non-empty string, got {_short(question)}")
        solution = self._solution(item)
        for key, text in ((name, question), (self.answer, solution)):
            _check_characters(key, text)
        final = solution
        if self.answer_after is not None:
            _, marker, final = solution.rpartition(self.answer_after)
            if not marker or not final.strip():
                raise RowError(f"{self.answer!r} has nothing after {self.answer_after!r}")
        compare = _field(item, self.compare_column)
        if compare is None:
            compare = self.compare
        if compare not in COMPARE:
            raise RowError(
                f"{self.compare_column!r} must be one of {', '.join(COMPARE)}, got {_short(compare)}"
            )
        final = final.strip()
        if self.judged and compare != "text" and final.lstrip("+-").casefold() in _NOT_FINITE:
            raise RowError(f"{self.answer!r} = {final} is no answer (compare: text takes it as a word)")
        return Row(number, question, solution, final, str(compare), item)

    def _solution(self, item: Record) -> str:
        value = _field(item, self.answer)
        if not self.judged and not isinstance(value, str):
            return "" if value is None else json.dumps(value, default=str)
        return _answer_text(self.answer, value)

    def _question(self, item: Record) -> tuple[str, Any]:
        if self.question is not None:
            return self.question, _field(item, self.question)
        keys = [key for key in QUESTION_KEYS if item.get(key) is not None]
        if len(keys) != 1:
            raise RowError(
                f"needs exactly one of {', '.join(QUESTION_KEYS)}; has {', '.join(sorted(item)) or 'nothing'}"
            )
        return keys[0], item[keys[0]]


def _field(item: Record, path: str) -> Any:
    if path in item:
        return item[path]
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _answer_text(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise RowError(f"{name!r} = {value} is no answer")
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name!r} must be a non-empty string or a number, got {_short(value)}")
    return str(value)


def _check_characters(name: str, text: str) -> None:
    if "\0" in text:
        raise RowError(f"{name!r} has a NUL character at position {text.index(chr(0))}")
    for position, character in enumerate(text) if not text.isascii() else ():
        if "\ud800" <= character <= "\udfff":
            raise RowError(f"{name!r} has a lone surrogate (\\u{ord(character):04x}) at position {position}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "…"


class ProblemIndex:
    """The rows of a file that may be asked, by position."""

    def __init__(self, source: ProblemSource, form: RowFormat, path: Path):
        self.source, self.form, self.path = source, form, path
        self._addresses, self._lines = array("Q"), array("Q")
        self._questions, self._training = array("Q"), array("B")
        self.kinds: Counter[str] = Counter()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def row(self, position: int) -> Row:
        """Raises `EnvConfigError` if the file was changed since it was read."""
        line = self._lines[position]
        try:
            row = self.form.row(line, self.source.read(self._addresses[position]))
        except (RowError, OSError, IndexError) as error:
            raise EnvConfigError(
                f"{self.path}: {self.source.unit} {line} changed after it was read: {error}"
            ) from error
        if _hash(normalise(row.question)) != self._questions[position]:
            raise EnvConfigError(
                f"{self.path}: {self.source.unit} {line} changed after it was read; start again"
            )
        return row

    def positions(self, training: bool) -> array[int]:
        """Positions of the rows of one split."""
        return array("Q", (i for i, flag in enumerate(self._training) if bool(flag) is training))

    def shared_lines(self, other: ProblemIndex) -> list[tuple[int, int]]:
        """(line here, line there) of the questions that both have."""
        mine, theirs = (np.frombuffer(index._questions, np.uint64) for index in (self, other))
        _, here, there = np.intersect1d(mine, theirs, return_indices=True)
        return sorted((self._lines[i], other._lines[j]) for i, j in zip(here, there, strict=True))

    def add(self, address: int, row: Row, training: bool) -> None:
        self._addresses.append(address)
        self._lines.append(row.line)
        self._questions.append(_hash(normalise(row.question)))
        self._training.append(training)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """(first position, later position) of rows with the same question."""
        hashes = np.frombuffer(self._questions, np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
        first: dict[int, int] = {}
        for place in same.tolist():
            key = int(hashes[order[place]])
            yield first.setdefault(key, int(order[place - 1])), int(order[place])

    def drop(self, positions: Sequence[int]) -> None:
        gone = set(positions)
        for name in ("_addresses", "_lines", "_questions", "_training"):
            values = getattr(self, name)
            setattr(self, name, array(values.typecode, (v for i, v in enumerate(values) if i not in gone)))
        self.dropped += len(gone)

    def summary(self) -> str:
        """One line for the log: rows, what was dropped, and how the answers are compared."""
        kinds = ", ".join(
            f"{count} {'' if kind == 'not at all' else 'as '}{kind}"
            for kind, count in sorted(self.kinds.items())
        )
        dropped = f", {self.dropped} identical {self.source.unit}s dropped" if self.dropped else ""
        return f"{self.path.name}: {len(self)} problems{dropped}; answers compared: {kinds}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_problems(
    path: Path,
    form: RowFormat,
    written: Callable[[str], str],
    extract: Callable[[str], str | None],
    equal: Callable[[str, str, str], bool],
    duplicates: str = "drop",
    in_training: Callable[[str], bool] = lambda question: True,
) -> ProblemIndex:
    """Reads and checks every row; raises `EnvConfigError` naming each that cannot be used.

    A row is refused whose own answer, written in the form that the model is asked for, would not be paid. duplicates:
    identical rows (same question and answer) are dropped and counted, or refused; the same question with another answer
    is always refused. in_training: whether a question belongs to the training split.
    """
    index = ProblemIndex(open_source(path), form, path)
    unit, found = index.source.unit, 0
    problems: list[tuple[int, str]] = []
    try:
        for number, address, content in index.source.scan():
            try:
                if isinstance(content, RowError):
                    raise content
                row = form.row(number, content)
                if form.judged:
                    _check_payable(row, written, extract, equal)
                index.add(address, row, in_training(row.question))
                index.kinds[kind_of(row.answer, row.compare) if form.judged else "not at all"] += 1
            except RowError as error:
                found += 1
                if len(problems) < MESSAGES_SHOWN:
                    problems.append((number, str(error)))
    except OSError as error:
        raise EnvConfigError(f"env.config: cannot read {path.absolute()}: {error}") from error
    repeated = []
    for first, later in index.repeated():
        one, two = index.row(first), index.row(later)
        identical = one.compare == two.compare and (
            normalise(one.answer) == normalise(two.answer) or equal(one.answer, two.answer, one.compare)
        )
        if identical and duplicates == "drop":
            repeated.append(later)
            index.kinds[kind_of(two.answer, two.compare) if form.judged else "not at all"] -= 1
        else:
            found += 1
            other = (
                ""
                if identical
                else f" with another answer ({_short(two.answer)}, there {_short(one.answer)})"
            )
            problems.append((two.line, f"the same question as {unit} {one.line}{other}"))
    index.drop(repeated)
    if not len(index) and not problems:
        raise EnvConfigError(f"{path}: no problem in it")
    if problems:
        shown = [f"{unit} {number}: {text}" for number, text in sorted(problems)[:MESSAGES_SHOWN]]
        more = [f"… and {found - len(shown)} more"] if found > len(shown) else []
        raise EnvConfigError("\n".join([f"{path}: {found} malformed:", *shown, *more]))
    (logger.warning if index.dropped else logger.info)(index.summary())
    return index


def _check_payable(
    row: Row,
    written: Callable[[str], str],
    extract: Callable[[str], str | None],
    equal: Callable[[str, str, str], bool],
) -> None:
    completion = written(row.answer)
    read = extract(completion)
    if read is None:
        raise RowError(
            f"the answer {_short(row.answer)} can never be earned: env.config.answer finds no answer in "
            f"{_short(completion)}; choose another kind of env.config.answer, or answer_after"
        )
    if read != row.answer and not equal(row.answer, read, row.compare):
        raise RowError(
            f"the answer {_short(row.answer)} can never be earned: env.config.answer reads {_short(read)} from "
            f"{_short(completion)}; choose another kind of env.config.answer, or answer_after"
        )
    if row.compare == "number" and not equal(row.answer, read, row.compare):
        raise RowError(f"the answer {_short(row.answer)} is not a number, which compare: number needs")
