"""Ctrl-C, SIGTERM, a closed terminal: finish the iteration, write a checkpoint, say how to go on.

A promise is made only where it can be kept: not before there is anything to keep, and not without Ray.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from ray.tune import Stopper

_READER_ENDS_MS = 2000
"""So long after a SIGHUP the reader of a pipe may take to end: it got the signal too."""
_ENDS_WITH_A_CHECKPOINT = (
    "\nInterrupted: finishing this iteration, then writing a checkpoint. Press Ctrl-C again to stop at once "
    "(the last periodic checkpoint stays)."
)
_ENDS_IF_IT_CAN = (
    "\nInterrupted by SIGTERM: the run ends with this iteration and a checkpoint of it, or, if Ray's processes got the "
    "signal too, at once with the last periodic checkpoint."
)


class Interrupt:
    """Catches SIGINT, SIGTERM and SIGHUP while it is entered; ``requested`` tells that one came.

    A second SIGINT or SIGTERM raises KeyboardInterrupt. A second SIGHUP does not: where a terminal closes, the shell
    repeats the kernel's. One that is ignored already (nohup) stays so.
    """

    def __init__(self) -> None:
        self.requested = False
        self.nothing_to_keep = False
        """Set while there is no iteration to finish: the first signal then raises KeyboardInterrupt, too."""
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Interrupt:
        self._terminals = [output for output in (1, 2) if os.isatty(output)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles stoppers; an earlier handler (Tune's own, say, which it leaves behind) may hold locks."""
        return {**self.__dict__, "_previous": {}}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_closed_outputs()
        if self.requested:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        self.requested = True
        if self.nothing_to_keep:
            raise KeyboardInterrupt
        # Ray's processes ignore Ctrl-C and a closed terminal; a SIGTERM may have gone to them, too.
        text = _ENDS_IF_IT_CAN if number == signal.SIGTERM else _ENDS_WITH_A_CHECKPOINT
        print(text, file=sys.stderr, flush=True)

    def _leave_closed_outputs(self) -> None:
        """Every write to a terminal that is gone, or to a pipe that nobody reads (``| tee log``), raises OSError, a
        progress bar's too: write nowhere instead."""
        for output in (1, 2):
            if self._is_closed(output):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)

    def _is_closed(self, output: int) -> bool:
        if output in self._terminals:
            return not os.isatty(output)
        try:
            pipe = stat.S_ISFIFO(os.fstat(output).st_mode)
        except OSError:  # a process may be started without (`>&-`)
            return False
        if not pipe:
            return False
        reader = select.poll()
        reader.register(output, 0)  # errors only: there is no reader
        return bool(reader.poll(_READER_ENDS_MS))


class RunStopper(Stopper):
    """Ends the trial after `iterations`, `max_minutes`, a metric that reaches its bound, or an interrupt.

    A trial that a Stopper ends writes its final checkpoint, which Tune's own SIGINT handling would skip.
    """

    def __init__(
        self, iterations: int, bounds: dict[str, float], max_minutes: float | None, interrupt: Interrupt
    ) -> None:
        self._iterations, self._bounds, self._max_minutes = iterations, bounds, max_minutes
        self._interrupt = interrupt
        self._first: float | None = None
        self.reason = ""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        from rllib_llm.tracking.entries import flatten

        if self._first is None:
            self._first = time.monotonic() - float(result.get("time_this_iter_s", 0.0))
        flat = flatten(result)
        reached = [
            f"{key} >= {bound:g}"
            for key, bound in self._bounds.items()
            if flat.get(key, float("-inf")) >= bound
        ]
        if self._interrupt.requested:
            self.reason = "interrupted"
        elif reached:
            self.reason = f"stopped: {reached[0]}"
        elif self._max_minutes is not None and time.monotonic() - self._first >= 60 * self._max_minutes:
            self.reason = f"stopped: {self._max_minutes:g} minutes are over"
        elif result["training_iteration"] >= self._iterations:
            self.reason = "finished"
        return bool(self.reason)

    def stop_all(self) -> bool:
        return False
