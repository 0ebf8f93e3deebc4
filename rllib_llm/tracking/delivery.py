"""Deliver tracking operations from a background thread: in order, retried, and never at the cost of training.

The driver's thread only appends to a queue. A store that does not answer keeps the head of the queue waiting, with
growing pauses; what is still undelivered when the run ends is written to a JSON-lines file from which
``rllib-llm tracking send`` can deliver it later.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rllib_llm.tracking.store import MLflowStore, Operation

logger = logging.getLogger(__name__)

_Numbered = tuple[int, Operation]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MAX_WAITING = 20_000  # operations; one iteration is one or two, so this is hours of a store that is away


@dataclass(frozen=True)
class DeliveryReport:
    """What became of the operations of one run of the driver."""

    delivered: int
    refused: tuple[str, ...]  # one line per operation that the store refused for good
    undelivered: int  # operations that wait in `spool`
    spool: Path | None

    @property
    def complete(self) -> bool:
        """Whether the store has everything."""
        return not self.refused and not self.undelivered

    def __str__(self) -> str:
        if self.complete:
            return f"tracking: {self.delivered} writes delivered"
        lines = [
            f"tracking: {self.delivered} writes delivered, {len(self.refused)} refused, {self.undelivered} undelivered"
        ]
        lines += [f"  refused: {line}" for line in self.refused[:5]]
        if self.spool is not None:
            command = f"rllib-llm tracking send {shlex.quote(str(self.spool))}"
            lines.append(f"  the rest waits in {self.spool}; send it with: {command}")
        return "\n".join(lines)


class Delivery:
    """A queue of operations and the thread that empties it into a store.

    Args:
        store: where operations go.
        spool: file that takes what could not be delivered by the time of ``close``.
    """

    def __init__(self, store: MLflowStore, spool: Path, max_waiting: int = _MAX_WAITING) -> None:
        self._store = store
        self._spool = spool
        self._max_waiting = max_waiting
        self._waiting: deque[_Numbered] = deque()
        self._next = time.time_ns()  # of the next operation: above every number of an earlier process
        self._changed = threading.Condition()
        self._closing = False
        self._hurry = False  # somebody waits: the next attempt comes now, not after the pause
        self._delivered = 0
        self._spooled = 0
        self._refused: list[str] = []
        self._refused_runs: set[str] = set()  # whose creation was refused: what belongs to them is spooled
        self._complained = False
        self._thread = threading.Thread(target=self._work, name="rllib-llm-tracking", daemon=True)
        self._thread.start()

    @property
    def run_ids(self) -> dict[str, str]:
        """The store's ids of the runs created so far, by our names."""
        return dict(self._store.run_ids)

    def submit(self, op: Operation) -> None:
        """Queue one operation; returns at once."""
        with self._changed:
            numbered, self._next = (self._next, op), self._next + 1
            if len(self._waiting) >= self._max_waiting:
                self._write_spool([numbered])
            else:
                self._waiting.append(numbered)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is delivered or refused; False when time ran out."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> DeliveryReport:
        """Deliver what can be delivered in ``timeout_s`` seconds, spool the rest, and report."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            if left:
                self._write_spool(left)
        return DeliveryReport(
            self._delivered, tuple(self._refused), self._spooled, self._spool if self._spooled else None
        )

    def _work(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                numbered = self._waiting[0]
            if self._waits_for_a_refused_run(numbered):
                continue
            error = self._attempt(numbered[1])
            with self._changed:
                if error is not None and not self._store.is_permanent(error):
                    self._complain(error, pause)
                    hurried = self._changed.wait_for(lambda: self._closing or self._hurry, pause)
                    pause = _FIRST_PAUSE_S if hurried else min(2 * pause, _LONGEST_PAUSE_S)
                    self._hurry = False
                    continue
                pause = _FIRST_PAUSE_S
                self._settle(numbered, error)

    def _waits_for_a_refused_run(self, numbered: _Numbered) -> bool:
        """Whether the operation belongs to a run that the store has refused to create. It is spooled then, as the
        creation is: `tracking send` delivers both when the cause is gone.
        """
        op = numbered[1]
        needed = op.payload.get("parent") if op.kind == "create" else op.run
        with self._changed:
            if needed not in self._refused_runs:
                return False
            if op.kind == "create":
                self._refused_runs.add(op.run)
            if self._waiting and self._waiting[0] is numbered:  # else `close` has spooled it
                self._waiting.popleft()
                self._write_spool([numbered])
            self._changed.notify_all()
            return True

    def _attempt(self, op: Operation) -> Exception | None:
        try:
            self._store.apply(op)
        except (
            Exception
        ) as error:  # the library documents no closed set, and nothing it raises may end training
            return error
        return None

    def _settle(self, numbered: _Numbered, error: Exception | None) -> None:
        """Take the head off the queue (unless ``close`` has taken it) and count its fate. Called with the lock held."""
        op, is_ours = numbered[1], bool(self._waiting) and self._waiting[0] is numbered
        if is_ours:
            self._waiting.popleft()
        if error is None:
            self._delivered += 1
            if self._complained:
                logger.warning(
                    "MLflow at %s answers again; %d writes to catch up", self._store.uri, len(self._waiting)
                )
                self._complained = False
        else:
            line = f"{op.kind} of run {op.run!r}: {_brief(error)}"
            self._refused.append(line)
            logger.warning("MLflow refused a write: %s", line)
            if op.kind == "create":
                self._refused_runs.add(op.run)
                if is_ours:  # else `close` has spooled it
                    self._write_spool([numbered])
        self._changed.notify_all()

    def _complain(self, error: Exception, pause: float) -> None:
        if not self._complained:
            logger.warning(
                "MLflow at %s does not answer (%s); training goes on, writes are kept and retried every %.1f s or more",
                self._store.uri,
                _brief(error),
                pause,
            )
            self._complained = True

    def _write_spool(self, ops: list[_Numbered]) -> None:
        """Append operations to the spool file, after one line that says which store and which runs they belong to.

        A queue that runs full spools what comes after what it holds, so their numbers say in which order to send.
        """
        header = {
            "tracking_uri": self._store.uri,
            "experiment": self._store.experiment,
            "run_ids": self._store.run_ids,
        }
        try:
            self._spool.parent.mkdir(parents=True, exist_ok=True)
            with self._spool.open("a", encoding="utf-8") as file:
                file.write(json.dumps(header) + "\n")
                file.writelines(json.dumps({**op.to_dict(), "number": number}) + "\n" for number, op in ops)
            self._spooled += len(ops)
        except OSError as error:
            self._refused.append(
                f"{len(ops)} writes lost: the file {self._spool} could not be written: {error}"
            )


def send_spooled(spool: Path, tracking_uri: str | None = None, timeout_s: float = 60.0) -> DeliveryReport:
    """Deliver a spool file left by an earlier run; on success the file is renamed to ``*.sent``.

    What is not delivered in `timeout_s` seconds, or at Ctrl-C, is what the file holds afterwards. Raises ValueError
    naming the line where the file is not one of ours.
    """
    uri, experiment, run_ids, ops = _read_spool(spool)
    again = spool.with_suffix(".again")
    again.unlink(missing_ok=True)  # of a process that was killed before it could put it in place
    delivery = Delivery(MLflowStore(tracking_uri or uri, experiment, run_ids), again, max_waiting=len(ops))
    for op in ops:
        delivery.submit(op)
    try:
        report = delivery.close(timeout_s)
    except KeyboardInterrupt:
        report = delivery.close(0.0)
    if report.undelivered == 0:
        spool.rename(spool.with_suffix(".sent"))
    else:
        again.replace(spool)
        report = DeliveryReport(report.delivered, report.refused, report.undelivered, spool)
    return report


def _read_spool(spool: Path) -> tuple[str, str, dict[str, str], list[Operation]]:
    """(store, experiment, run ids, operations in the order in which they were submitted)."""
    uri = experiment = ""
    run_ids: dict[str, str] = {}
    ops: list[_Numbered] = []
    try:
        lines = spool.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{spool} cannot be read: {error}") from error
    for position, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if "tracking_uri" in record:
                uri, experiment = record["tracking_uri"], record["experiment"]
                run_ids.update(record["run_ids"])
            else:
                op = Operation(record["run"], record["kind"], record["payload"])
                ops.append((record.get("number", position), op))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{spool}, line {position}: not a tracking operation ({error!r})") from error
    if not uri:
        raise ValueError(f"{spool} names no tracking store; it is not a file that a run has left")
    return uri, experiment, run_ids, [op for _, op in sorted(ops, key=lambda numbered: numbered[0])]


def _brief(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def now_ms() -> int:
    """Milliseconds since the epoch, MLflow's unit of time."""
    return int(time.time() * 1000)
