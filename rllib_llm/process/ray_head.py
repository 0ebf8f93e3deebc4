"""Noticing that the Ray of this process is gone, while calls to Ray do nothing but wait for it.

Ray's own answer to a lost head is to wait for 60 s and then to abort the driver: no Python code runs any more then. A
scheduler, `timeout` and a container that is stopped send SIGTERM to every process of a job, and SIGKILL 10 to 30 s
later.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["RayHead", "RayWatch"]

_PERIOD_S = 0.25
_RECONNECT_S = 40.0
"""So long a joined cluster's head may be unreachable: less than the 60 s after which Ray aborts the driver."""
_HEAD_PROCESSES = ("gcs_server", "raylet")


class RayHead:
    """Whether the head that this process uses is there: its processes where we started it, else its port.

    Made after `ray.init`; asks the kernel, not Ray.
    """

    def __init__(self, *, joined: bool) -> None:
        import ray
        from ray._private import worker

        self._node = worker._global_node
        self._address = ray.get_runtime_context().gcs_address if joined else ""
        self._unreachable_since: float | None = None

    def lost(self, patience_s: float = _RECONNECT_S) -> str:
        """What is gone, in words; empty while all is there. patience_s: for a head on another machine."""
        if self._address:
            return self._lost_by_port(patience_s)
        if self._node is None:
            return ""
        dead = sorted({kind for kind, _ in self._node.dead_processes()} & {*_HEAD_PROCESSES})
        return f"Ray's {' and '.join(dead)} on this machine ended" if dead else ""

    def end_the_rest(self) -> None:
        """End the processes of a Ray that was started here and has lost some of them."""
        if self._node is not None and not self._address:
            with contextlib.suppress(Exception):  # whatever is left of it must not stop the caller's own end
                self._node.kill_all_processes(check_alive=False, allow_graceful=False)

    def _lost_by_port(self, patience_s: float) -> str:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            self._unreachable_since = None
            return ""
        except OSError as error:
            since = self._unreachable_since = self._unreachable_since or time.monotonic()
            seconds = time.monotonic() - since
            return "" if seconds < patience_s else f"Ray's head at {self._address} is gone ({error})"


class RayWatch:
    """A thread that calls `on_lost(what)` once, when the head is lost. `on_lost` ends the process."""

    def __init__(self, head: RayHead, *, period_s: float = _PERIOD_S) -> None:
        self.head = head
        self.on_lost: Callable[[str], None] | None = None
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rllib-llm-ray-watch", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Returns while the head is there. If it is not, `on_lost` is at work and ends this process: wait for that."""
        if self.on_lost is not None and self.head.lost(patience_s=0.0):
            self._thread.join()

    def stop(self) -> None:
        """Before Ray is ended on purpose."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._period_s):
            what = self.head.lost()
            if what and self.on_lost is not None:
                self.on_lost(what)
                return
