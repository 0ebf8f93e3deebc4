"""Where learner and engines meet during a push: keys in a torch `TCPStore` that the learner serves.

Per push every engine reports after each phase ("ready", "verified", "held"), and goes on when the learner says so to
all: no engine applies anything unless every engine has verified everything.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore

from rllib_llm.sync.topology import WeightTransportError

_SLICE_S = 0.1
"""Longest that a wait does not look whether the push was given up."""
_STOP, _OK, _REFUSED = "stop", "ok", "refused: "


def serve(host: str, timeout_s: float) -> Any:
    """A store on a free port of this process; `host` is the name under which other nodes reach it."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect(host: str, port: int, timeout_s: float) -> Any:
    """A client of `serve`'s store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(host: str, port: int) -> str:
    """Numeric address under which this process is seen from ``host:port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


class Meeting:
    """The keys of one push, as the learner (rank 0) or one engine (rank 1, 2, …) sees them."""

    def __init__(self, store: Any, push: str, engines: int, timeout_s: float) -> None:
        self.store, self.push, self.engines, self.timeout_s = store, push, engines, timeout_s
        self._keys: set[str] = set()

    # ------------------------------------------------------------------ both

    def put(self, key: str, text: str = _OK) -> None:
        """Write a key that the other side waits for; WeightTransportError if the store is gone."""
        try:
            self.store.set(self._key(key), text)
        except DistError as error:
            raise WeightTransportError(f"the learner's store is gone ({error})") from error

    def wait(self, keys: Sequence[str], what: str, late: Callable[[], str] | None = None) -> list[str]:
        """Texts of `keys` once all are there.

        Args:
            what: what is waited for, for the error; `late` says it once the time is over.

        Raises:
            WeightTransportError: not within the timeout, the push was given up by somebody, or the store is gone.
        """
        deadline = time.monotonic() + self.timeout_s
        full = [self._key(k) for k in keys]
        while True:
            self.check_stopped()
            left = deadline - time.monotonic()
            if left <= 0:
                what = late() if late else what
                raise WeightTransportError(f"{what}: nothing came within {self.timeout_s:.0f} s")
            try:
                self.store.wait(full, timedelta(seconds=min(left, _SLICE_S)))
                return [self.store.get(k).decode() for k in full]
            except DistStoreError:
                continue
            except DistError as error:
                raise WeightTransportError(f"{what}: the learner's store is gone ({error})") from error

    def poll(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`; errors as of `wait`."""
        deadline, looked = time.monotonic() + self.timeout_s, time.monotonic()
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise WeightTransportError(f"{what}: not done within {self.timeout_s:.0f} s")
            if now - looked > _SLICE_S:
                self.check_stopped()
                looked = now
            time.sleep(2e-4)

    def stop(self, why: str) -> None:
        """Give the push up for everybody. The first reason stays."""
        if not self._there(_STOP):
            self.put(_STOP, why)

    def check_stopped(self) -> None:
        """Raises WeightTransportError if the push was given up."""
        if self._there(_STOP):
            why = self.store.get(self._key(_STOP)).decode()
            raise WeightTransportError(f"the push was given up: {why}")

    # ------------------------------------------------------------------ an engine

    def report(self, phase: str, rank: int) -> None:
        """This engine has completed `phase`; returns when all have."""
        self.put(f"{phase}/{rank}")
        self.wait(
            [f"{phase}/go"], f"waiting for the other engines after {phase!r}", partial(self._late, phase)
        )

    def refuse(self, phase: str, rank: int, why: str) -> None:
        """This engine does not go on; the push ends for all."""
        self.put(f"{phase}/{rank}", _REFUSED + why)

    # ------------------------------------------------------------------ the learner

    def gather(self, phase: str) -> None:
        """Wait for every engine's report on `phase`, then let them go on.

        Raises:
            WeightTransportError: some refused (each named by its rank), or did not report.
        """
        ranks = range(1, self.engines + 1)
        texts = self.wait(
            [f"{phase}/{r}" for r in ranks],
            f"waiting for engines to report {phase!r}",
            partial(self._late, phase),
        )
        refused = [f"engine {r} {t}" for r, t in zip(ranks, texts, strict=True) if t != _OK]
        if refused:
            raise WeightTransportError("; ".join(refused))
        self.put(f"{phase}/go")

    def forget(self) -> None:
        """Delete the keys that this side has seen; the store would keep them for ever."""
        for key in self._keys:
            self.store.delete_key(key)
        self._keys.clear()

    def _late(self, phase: str) -> str:
        """Who is to blame when nobody goes on after `phase`: engine and learner see the same, and either may say it."""
        silent = [str(r) for r in range(1, self.engines + 1) if not self._there(f"{phase}/{r}")]
        who = (
            f"engine {', '.join(silent)} of {self.engines} to report"
            if silent
            else "the learner to go on after"
        )
        return f"waiting for {who} {phase!r}"

    def _there(self, key: str) -> bool:
        try:
            there: bool = self.store.check([self._key(key)])
        except DistError as error:
            raise WeightTransportError(f"the learner's store is gone ({error})") from error
        return there

    def _key(self, key: str) -> str:
        full = f"{self.push}/{key}"
        self._keys.add(full)
        return full
