"""Tasks in processes side by side, each process with the next task when it is done with one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllib_llm.errors import RllibLLMError

__all__ = ["CompileProcessError", "run_tasks"]

_LAST_LINES = 12


class CompileProcessError(RllibLLMError, RuntimeError):
    """A process that compiles kernels ended before its work was done; the message has its last lines."""


def run_tasks(
    function: str,
    tasks: Sequence[Mapping[str, Any]],
    processes: int,
    on_step: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Have processes run ``function`` ("module:name", see `warming.worker`) on every task.

    on_step: called here with the text of every step. environment: variables of the processes, beside this one's.

    Returns: of each task that failed, why.

    Raises CompileProcessError where a process ended by itself. However this ends, by KeyboardInterrupt too, no
    process is left, nor any that one of them started.
    """
    waiting, failures = deque(tasks), list[str]()
    variables = dict(os.environ) | dict(environment or {})
    children: list[_Child] = []
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(processes, len(tasks))):
                child = _Child(function, variables)
                children.append(child)
                child.give(waiting.popleft())
                selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map():
                for key, _ in selector.select():
                    _hear(key.data, waiting, failures, on_step)
                    if key.data.idle:
                        selector.unregister(key.data.output)
        finally:
            for child in children:
                child.end()
    return failures


def _hear(
    child: _Child, waiting: deque[Mapping[str, Any]], failures: list[str], on_step: Callable[[str], None]
) -> None:
    for message in child.messages():
        if "step" in message:
            child.last_step = message["step"]
            on_step(message["step"])
            continue
        if "failed" in message:
            failures.append(f"{message['failed']} ({child.doing})")
        if waiting:
            child.give(waiting.popleft())
        else:
            child.idle = True


class _Child:
    """One process in a session of its own: a Ctrl-C reaches only its parent, and what it starts ends with it."""

    def __init__(self, function: str, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        # -P: a file in the current directory must not take the place of a module.
        command = [sys.executable, "-P", "-m", "rllib_llm.warming.worker", function]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            start_new_session=True,
        )
        self._partial = b""
        self._task: Mapping[str, Any] = {}
        self.last_step = ""
        self.idle = False

    @property
    def output(self) -> int:
        """The descriptor of its messages."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def doing(self) -> str:
        """What it works on, in words."""
        return (
            f"after {self.last_step}" if self.last_step else f"at the start of {json.dumps(self._task)[:300]}"
        )

    def give(self, task: Mapping[str, Any]) -> None:
        """Its next task."""
        self._task, self.last_step = task, ""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `messages` will find
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def messages(self) -> list[dict[str, Any]]:
        """What it has sent since; waits if that is nothing. Raises CompileProcessError where it has ended."""
        data = os.read(self.output, 1 << 16)
        if not data:
            raise CompileProcessError(self._how_it_ended())
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        said = "; it printed nothing" if not lines else "; its last lines:\n" + "\n".join(lines)
        return f"a process that compiles kernels ended {how}, {self.doing}{said}"

    def end(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
