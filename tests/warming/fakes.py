"""What worker processes of the tests run in place of compiling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def work(task: Mapping[str, Any]) -> Iterator[str]:
    """Do what the task says: steps, a failure, a death, a kernel in the cache, or work that never ends."""
    print("nvcc says something on stdout")
    yield from task.get("steps", ())
    if "kernel" in task:
        (Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache" / f"kernel.{task['kernel']}").mkdir(parents=True)
        yield "compiled"
    if "fails" in task:
        raise ValueError(task["fails"])
    if "dies" in task:
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if "hangs" in task:
        child = subprocess.Popen(["sleep", "3600"])
        Path(task["hangs"]).write_text(f"{os.getpid()} {child.pid}")
        yield "hanging"
        child.wait()
