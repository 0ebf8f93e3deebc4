"""`rllib-llm watch`: reward, mismatch and speed of a run, from another terminal, while it goes on."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rllib_llm.cli import table
from rllib_llm.cli.parsing import UsageError, new_parser, positive
from rllib_llm.cli.progress import in_thousands, span
from rllib_llm.cli.summary import History, held_out_text
from rllib_llm.on_disk.directories import EXPERIMENT_FILE
from rllib_llm.tracking.history import read_history

__all__ = ["add_watch_parser", "sparkline", "view"]

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 48  # of a curve: with names and numbers it fits 80 columns
_CURVES = (
    ("reward", "env_runners/episode_return_mean"),
    ("mismatch k3", "mismatch/k3"),
    ("mismatch max |Δlogp|", "mismatch/max_abs"),
)
_SPEED = "env_runners/tokens_per_s"
_CLEAR = "\033[H\033[2J"


def add_watch_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = new_parser(
        subparsers,
        "watch",
        "show reward, mismatch and speed of a run while it goes on",
        "  rllib-llm watch results/quickstart-unified-fp8-20260101-120000\n"
        "  rllib-llm watch results/… --once",
    )
    parser.add_argument("directory", help="an experiment directory; its metrics.jsonl is read")
    parser.add_argument(
        "--every", type=positive, default=5, metavar="S", help="seconds between two looks (default 5)"
    )
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.directory)
    if not (directory / EXPERIMENT_FILE).is_file():
        raise UsageError(f"{directory} is no experiment directory: it has no {EXPERIMENT_FILE}")
    total, shown = _iterations(directory / EXPERIMENT_FILE), None
    try:
        while True:
            history = read_history(directory)
            done = int(history[-1]["training_iteration"]) if history else 0
            if done != shown:
                print((_CLEAR if sys.stdout.isatty() else "") + view(history, total, time.time()), flush=True)
                shown = done
            if arguments.once or (total is not None and done >= total):
                return 0
            time.sleep(arguments.every)
    except KeyboardInterrupt:  # how one stops looking; the run goes on
        return 0


def _iterations(file: Path) -> int | None:
    """`run.iterations` of an experiment's file; None where it cannot be read."""
    try:
        return int(yaml.safe_load(file.read_text(encoding="utf-8"))["run"]["iterations"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError, UnicodeDecodeError):
        return None


def view(history: History, total: int | None, now: float) -> str:
    """The curves of a run as text. total: iterations it is to have; now: unix time."""
    if not history:
        return "no iteration yet: the first one takes longest"
    last = history[-1]
    done = int(last["training_iteration"])
    rows = [("iteration", f"{done} of {total if total is not None else '?'}{_left(history, total)}")]
    for name, key in _CURVES:
        values = [row[key] for row in history if key in row]
        if values:
            rows.append(
                (
                    name,
                    f"{sparkline(values)}  {values[-1]:.3g}  (smallest {min(values):.3g}, largest {max(values):.3g})",
                )
            )
    rows.append(("held-out reward", held_out_text(history)))
    if speeds := [row[_SPEED] for row in history if _SPEED in row]:
        rows.append(("sampling speed", f"{sparkline(speeds)}  {in_thousands(speeds[-1])} tok/s"))
    if "unix_time" in last:
        rows.append(("last result", f"{span(max(0.0, now - last['unix_time']))} ago"))
    return table.pairs(rows)


def _left(history: History, total: int | None) -> str:
    """``, about 4 min left``: by the median of the last iterations, which a slow first one does not move."""
    seconds = sorted(row["time_this_iter_s"] for row in history[-9:] if "time_this_iter_s" in row)
    left = 0 if total is None else total - int(history[-1]["training_iteration"])
    return f", about {span(left * seconds[len(seconds) // 2])} left" if seconds and left > 0 else ""


def sparkline(values: Sequence[float]) -> str:
    """One character per value, of more than 48 values one per stretch (its mean); a flat curve is a low line."""
    length = len(values)
    points = min(length, _POINTS)
    edges = [i * length // points for i in range(points + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[min(7, int(8 * (mean - low) / span))] if span > 0 else _BARS[0] for mean in means)
