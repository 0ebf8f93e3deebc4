"""What is visible while training runs: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from ray import tune
from tqdm import tqdm

from rllib_llm.cli.bar import SECONDS_BETWEEN_LINES, new_bar
from rllib_llm.tracking.entries import metrics_of


class ProgressCallback(tune.Callback):
    """A tqdm bar over the iterations with reward, mismatch and speed; plain lines where stderr is no terminal."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._bar: tqdm | None = None
        self._last_line = 0.0
        self._began = 0.0  # when the first result came
        self._first: int | None = None  # its iteration

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        row = metrics_of(result)
        done = int(row["training_iteration"])
        if self._first is None:
            self._began, self._first = time.monotonic(), done
        if sys.stderr.isatty():
            self._draw(done, row)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or done in (1, self._iterations):
            self._last_line = time.monotonic()
            left = time_left(self._began, self._first, done, self._iterations)
            line = f"iteration {done}/{self._iterations}{left}  {status_text(row)}"
            print(line, file=sys.stderr, flush=True)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, done: int, row: dict[str, float]) -> None:
        if self._bar is None:
            # speed and time left are those of the iterations after the first, which starts up
            self._bar = new_bar(total=self._iterations, initial=done, unit="it")
        self._bar.set_postfix_str(status_text(row), refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bar": None}


def status_text(row: dict[str, float]) -> str:
    """``reward 0.62 · mismatch k3 0 max 0 bit-equal 100% · 4.2k tok/s``; what was not measured is left out."""
    parts = []
    if "env_runners/episode_return_mean" in row:
        parts.append(f"reward {row['env_runners/episode_return_mean']:.3f}")
    for key in ("evaluation", "evaluation_at_start"):
        if (reward := row.get(f"{key}/env_runners/episode_return_mean")) is not None:
            parts.append(f"held-out {reward:.3f}{' before training' if key == 'evaluation_at_start' else ''}")
    if "mismatch/k3" in row:
        parts.append(
            f"mismatch k3 {row['mismatch/k3']:.2g} max {row['mismatch/max_abs']:.2g} "
            f"bit-equal {100 * row['mismatch/bit_equal_share']:.4g}%"
        )
    if "env_runners/tokens_per_s" in row:
        parts.append(f"{in_thousands(row['env_runners/tokens_per_s'])} tok/s")
    if lost := row.get("env_runners/num_reward_errors_lifetime"):
        parts.append(f"{lost:.0f} samples lost to reward errors")
    return " · ".join(parts)


def time_left(began: float, first: int | None, done: int, total: int) -> str:
    """``, about 4 min left``, at the rate since the result ``first`` came at ``began`` (monotonic); "" where unknown.

    The first result starts the clock: it took the start-up too.
    """
    if first is None or not first < done < total:
        return ""
    return f", about {span((time.monotonic() - began) / (done - first) * (total - done))} left"


def in_thousands(number: float) -> str:
    """``4.2k`` from a thousand on, ``812`` below: a slow machine must not read ``0.8k`` or ``0.0k``."""
    return f"{number / 1000:.1f}k" if number >= 999.5 else f"{number:.0f}"


def span(seconds: float) -> str:
    """``40 s``, ``4 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
