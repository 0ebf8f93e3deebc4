"""The curve of a run on disk: one JSON line per iteration, written as training goes, read for the closing table."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ray import tune

from rllib_llm.tracking.entries import metrics_of

FILE = "metrics.jsonl"


class HistoryCallback(tune.Callback):
    """Appends the finite metrics of every result to ``metrics.jsonl`` in the experiment directory."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        row = {"unix_time": time.time(), **metrics_of(result)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("" if _ends_a_line(self._file) else "\n") + json.dumps(row) + "\n")


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read(1) in (b"", b"\n")


def read_history(directory: Path) -> list[dict[str, float]]:
    """Rows in order of iteration; of an iteration that was repeated after a resume, the later row counts.

    A line without its end, as a process leaves it that is ended while it writes, is left out: its iteration comes after
    the last checkpoint and is trained again. So is any other line that is no row: a curve is looked at when training is
    over, and must not take its outcome away.
    """
    rows: dict[int, dict[str, float]] = {}
    path = directory / FILE
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                rows[int(row["training_iteration"])] = row
            except (ValueError, TypeError, KeyError):
                continue
    return [rows[iteration] for iteration in sorted(rows)]
