"""SIGTERM before there is anything to keep: while modules are imported, Ray starts, or a command reads files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["kept_handler", "sigterm_as_ctrl_c"]


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """While it is entered, SIGTERM raises KeyboardInterrupt, unless somebody else handles or ignores it already."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def kept_handler() -> Iterator[None]:
    """Puts the handler of SIGTERM back in place: `ray.init` installs one that raises SystemExit(15), which is
    KeyboardInterrupt here.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            raise KeyboardInterrupt from error
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
