"""A process that works off tasks: `python -m rllib_llm.warming.worker module:function`, started by `warming.pool`.

Tasks come as JSON lines on stdin. The function gets a task and yields a text per step. Of each step, of a task that is
done and of one that failed a JSON line goes to what was stdout. Whatever else is printed, by nvcc too, goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

__all__ = ["main"]


def main(function: str) -> None:
    """Work off tasks until stdin ends."""
    messages = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        _run(work, json.loads(line), messages)


def _run(work: Any, task: Any, messages: TextIO) -> None:
    try:
        for step in work(task):
            _send(messages, step=step)
    except Exception as error:
        traceback.print_exc()
        _send(messages, failed=f"{type(error).__name__}: {error}")
    else:
        _send(messages, done=True)


def _send(messages: TextIO, **message: Any) -> None:
    messages.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
