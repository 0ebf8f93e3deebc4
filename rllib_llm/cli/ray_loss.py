"""The end of a process whose Ray is gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rllib_llm.process.ray_head import RayHead

__all__ = ["end_process"]


def end_process(report: Callable[[str], int], head: RayHead) -> Callable[[str], None]:
    """What a `RayWatch` calls: makes the report of what is lost, and ends this process with the status it returns.

    The main thread waits in Ray for a head that does not come back, and Ray would abort the process: neither `finally`
    nor `atexit` can be relied on, so the process ends here.
    """

    def end(what: str) -> None:
        status = 1
        try:
            status = report(what)
        finally:
            head.end_the_rest()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    return end
