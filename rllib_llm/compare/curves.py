"""Raw results of a comparison: one row per arm, seed and iteration, in JSON lines or CSV.

The format (docs/experiments.md) is open: results gathered by another program are reported like those of
`rllib-llm compare`. Nothing that is read here is executed or unpickled.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.on_disk.atomic import write_whole

__all__ = ["SCHEMA", "STATUSES", "CurveWriter", "Curves", "CurvesError", "Run", "read_curves"]

SCHEMA = "rllib-llm/curves/1"
DESCRIPTION_FILE = "compare.json"
CURVE_FILE = "curves.jsonl"
STATUSES = ("finished", "running", "failed", "halted")
_KEYS = ("arm", "seed", "iteration")
_SHOWN = 20  # problems listed in one error: a file of the wrong kind has one per line


class CurvesError(RllibLLMError, InputError, ValueError):
    """Raw results that cannot be read; `.problems` holds one sentence per problem, with file and line."""

    def __init__(self, source: Path, problems: list[str]):
        self.problems = tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        lines = [f"  {i}. {text}" for i, text in enumerate(problems[:_SHOWN], 1)]
        if len(problems) > _SHOWN:
            lines.append(f"  … and {len(problems) - _SHOWN} more")
        super().__init__("\n".join([f"{source}: {count}", *lines]))


@dataclass(frozen=True)
class Run:
    """One cell: an arm with a seed.

    rows: iteration -> metric -> value, iterations ascending. A metric that was not measured has no entry; a value that
    is not finite was measured. status: one of STATUSES. reason: why it is not "finished"; empty if unknown.
    """

    arm: str
    seed: int
    rows: dict[int, dict[str, float]]
    status: str = "running"
    reason: str = ""

    def series(self, metric: str) -> dict[int, float]:
        """Iteration -> value, where measured; non-finite values included."""
        return {i: row[metric] for i, row in self.rows.items() if metric in row}

    @property
    def last_iteration(self) -> int:
        """The largest iteration of this run that has a row."""
        return max(self.rows, default=0)


@dataclass(frozen=True)
class Curves:
    """All runs, ordered by arm as planned and then by seed, and what `compare.json` says about them."""

    runs: tuple[Run, ...]
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, each once, in the order of the runs."""
        return tuple(dict.fromkeys(run.arm for run in self.runs))

    def of(self, arm: str) -> tuple[Run, ...]:
        """The runs of one arm."""
        return tuple(run for run in self.runs if run.arm == arm)

    def measured(self, metric: str) -> bool:
        """Whether any run has a value of this metric."""
        return any(metric in row for run in self.runs for row in run.rows.values())


class CurveWriter:
    """Appends rows to ``curves.jsonl`` and keeps ``compare.json``, replaced in one step at every change.

    Args:
        directory: made if missing. What it describes already is kept, so a writer may go on with an earlier one's work.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = self.directory / CURVE_FILE
        self._description = _read_description(self.directory / DESCRIPTION_FILE, [])

    def row(self, arm: str, seed: int, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration; flushed at once. A later row of the same arm, seed and iteration replaces an earlier one."""
        record = {"arm": arm, "seed": int(seed), "iteration": int(iteration)}
        record |= {name: float(value) for name, value in metrics.items() if name not in _KEYS}
        _end_last_line(self._file)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def describe(self, **entries: Any) -> None:
        """Sets keys of ``compare.json``: title, baseline, planned, arms, environment, config, notes."""
        self._description |= {"schema": SCHEMA, **entries}
        text = json.dumps(self._description, indent=1, ensure_ascii=False)
        write_whole(self.directory / DESCRIPTION_FILE, text)

    @property
    def states(self) -> dict[tuple[str, int], tuple[str, str]]:
        """(arm, seed) -> (status, reason), of the runs that have begun."""
        return {
            (r["arm"], r["seed"]): (r["status"], r.get("reason", ""))
            for r in self._description.get("runs", [])
        }

    def status(self, arm: str, seed: int, status: str, reason: str = "") -> None:
        """How a run stands: one of STATUSES."""
        if status not in STATUSES:
            raise ValueError(f"status = {status!r} must be one of {', '.join(STATUSES)}.")
        others = [r for r in self._description.get("runs", []) if (r["arm"], r["seed"]) != (arm, seed)]
        self.describe(runs=[*others, {"arm": arm, "seed": int(seed), "status": status, "reason": reason}])


def read_curves(directory: str | Path) -> Curves:
    """Every ``curves*.jsonl`` and ``curves*.csv`` of a directory, in order of name, and its ``compare.json``.

    A last line of a JSON-lines file that is cut off is left out: a process was ended while it wrote it.
    Raises CurvesError listing what cannot be read, with file and line.
    """
    folder = Path(directory).expanduser()
    problems: list[str] = []
    files = sorted(
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name.startswith("curves") and path.suffix in (".jsonl", ".csv")
    )
    if not files:
        what = "no curves*.jsonl or curves*.csv here" if folder.is_dir() else "no such directory"
        raise CurvesError(folder, [f"{what}; see docs/experiments.md."])
    rows: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for file in files:
        records = _json_records(file, problems) if file.suffix == ".jsonl" else _csv_records(file, problems)
        try:
            for place, record in records:
                _take(record, place, rows, problems)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            problems.append(f"{file.name}: cannot be read as UTF-8 text ({error}).")
    description = _read_description(folder / DESCRIPTION_FILE, problems)
    statuses = _statuses(description, problems)
    if problems:
        raise CurvesError(folder, problems)
    if not rows:
        raise CurvesError(folder, [f"no complete row in {', '.join(file.name for file in files)}."])
    return Curves(tuple(_runs(rows, description, statuses)), description)


# ---- inner workings --------------------------------------------------------------------------------------------------


def _runs(rows: Any, description: dict[str, Any], statuses: Any) -> Iterator[Run]:
    planned = description.get("planned") or {}
    wanted = planned.get("iterations")
    order = {arm: i for i, arm in enumerate(planned.get("arms") or dict.fromkeys(arm for arm, _ in rows))}
    for arm, seed in sorted(rows, key=lambda cell: (order.get(cell[0], len(order)), cell)):
        ordered = dict(sorted(rows[arm, seed].items()))
        done = wanted is not None and max(ordered) >= wanted
        status, reason = statuses.get((arm, seed), ("finished" if done else "running", ""))
        yield Run(arm, seed, ordered, status, reason)


def _take(record: Mapping[str, Any], place: str, rows: Any, problems: list[str]) -> None:
    arm, seed, iteration = (record.get(key) for key in _KEYS)
    wrong = []
    if not isinstance(arm, str) or not arm:
        wrong.append(f"{place}: arm = {arm!r} must be a text.")
    if not _whole(seed, 0):
        wrong.append(f"{place}: seed = {seed!r} must be a whole number >= 0.")
    if not _whole(iteration, 1):
        wrong.append(f"{place}: iteration = {iteration!r} must be a whole number >= 1.")
    values = {key: value for key, value in record.items() if key not in _KEYS and value is not None}
    wrong += [
        f"{place}: {key} = {str(value)[:60]!r} must be a number, null or left out."
        for key, value in values.items()
        if not _number(value)
    ]
    if wrong:
        problems += wrong
        return
    rows.setdefault((arm, int(seed)), {})[int(iteration)] = {k: float(v) for k, v in values.items()}  # type: ignore[arg-type]


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number above 1.8e308
        return False
    return True


def _json_records(file: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = file.read_text(encoding="utf-8-sig").split("\n")  # Windows programs put a mark in front
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (
            ValueError,
            RecursionError,
        ) as error:  # not only JSONDecodeError: numbers of 5 000 digits, depth
            if number < len(lines):
                problems.append(f"{file.name}, line {number}: no JSON ({_reason(error)}).")
            continue
        if isinstance(record, dict):
            yield f"{file.name}, line {number}", record
        else:
            problems.append(f"{file.name}, line {number}: must be an object with arm, seed and iteration.")


def _csv_records(file: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        if missing := [key for key in _KEYS if key not in (reader.fieldnames or ())]:
            problems.append(f"{file.name}, line 1: no column {', '.join(missing)}.")
            return
        for line in reader:
            place = f"{file.name}, line {reader.line_num}"
            if None in line:
                problems.append(f"{place}: more cells than the header has.")
                continue
            yield place, {key: _cell(key, text) for key, text in line.items()}


def _reason(error: ValueError | RecursionError) -> str:
    """Without the line, which is always the first of a text of one."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _cell(key: str, text: str | None) -> Any:
    if key == "arm" or not text:
        return text or None
    for kind in (int, float) if key in _KEYS else (float,):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _read_description(file: Path, problems: list[str]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name}: no JSON ({error}).")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{file.name}: must be an object.")
        return {}
    if found.get("schema", SCHEMA) != SCHEMA:
        problems.append(f"{file.name}: schema = {found['schema']!r}; this version reads {SCHEMA!r}.")
    problems += [f"{file.name}: {text}" for text in _wrong_kinds(found)]
    return found


def _wrong_kinds(found: Mapping[str, Any]) -> Iterator[str]:
    """What in `compare.json` has another type than docs/experiments.md says."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
    kinds = {"planned": dict, "arms": dict, "environment": dict, "runs": list, "notes": list}
    kinds |= {"title": str, "baseline": str, "config": str}
    planned = found["planned"] if isinstance(found.get("planned"), dict) else {}
    arms = found["arms"] if isinstance(found.get("arms"), dict) else {}
    places = [
        *((key, found[key], kind) for key, kind in kinds.items() if key in found),
        *(
            (f"planned.{key}", planned[key], kind)
            for key, kind in {"arms": list, "seeds": list, "iterations": int}.items()
            if key in planned
        ),
        *(
            (f"planned.{key}[{i}]", item, kind)
            for key, kind in {"arms": str, "seeds": int}.items()
            if isinstance(planned.get(key), list)
            for i, item in enumerate(planned[key])
        ),
        *((f"arms.{arm}", entry, dict) for arm, entry in arms.items()),
    ]
    for place, value, kind in places:
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = "" if isinstance(value, (dict, list)) else f" = {str(value)[:60]!r}"
            yield f"{place}{shown} must be {names[kind]}."


def _statuses(description: Mapping[str, Any], problems: list[str]) -> dict[tuple[str, int], tuple[str, str]]:
    out = {}
    entries: Iterable[Any] = description.get("runs") or ()
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        if not isinstance(entry, dict) or not {"arm", "seed", "status"} <= set(entry):
            problems.append(f"{DESCRIPTION_FILE}: runs[{number}] needs arm, seed and status.")
        elif not isinstance(entry["arm"], str) or not _whole(entry["seed"], 0):
            problems.append(
                f"{DESCRIPTION_FILE}: runs[{number}] has arm = {entry['arm']!r}, seed = {entry['seed']!r}; a text and "
                "a whole number >= 0 are needed."
            )
        elif entry["status"] not in STATUSES:
            problems.append(
                f"{DESCRIPTION_FILE}: runs[{number}].status = {entry['status']!r} must be one of {', '.join(STATUSES)}."
            )
        else:
            out[entry["arm"], entry["seed"]] = entry["status"], str(entry.get("reason", ""))
    return out


def _end_last_line(file: Path) -> None:
    """Cuts away a last line that a process was ended in the middle of: with a row after it the file were unreadable."""
    if not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb+") as stream:
        stream.seek(-1, 2)
        if stream.read(1) == b"\n":
            return
        stream.seek(0)
        whole, _, last = stream.read().rpartition(b"\n")
        try:
            json.loads(last)
            stream.write(b"\n")
        except ValueError:
            stream.truncate(len(whole) + 1 if whole else 0)


def finite(values: Iterable[float]) -> list[float]:
    """Those of the values that are numbers."""
    return [value for value in values if math.isfinite(value)]
