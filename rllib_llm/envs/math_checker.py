"""`Comparison` with math-verify behind a timeout that holds in any thread."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

from rllib_llm.envs.comparison import Comparison
from rllib_llm.envs.protocol import EnvConfigError
from rllib_llm.errors import RllibLLMError

_WORKER = Path(__file__).with_name("math_worker.py")
# The first answer waits for the import of sympy, seconds on a busy machine; that is no fault of the answer.
STARTUP_SECONDS = 120.0
_FIRST: dict[str, str | bool] = {"gold": "1", "answer": "1", "prose": False}


class MathCheckError(RllibLLMError, RuntimeError):
    """math-verify itself failed on this pair of texts."""


class MathChecker:
    """`checker.equal(gold, answer, compare)`; formulas go to a helper process, started when needed and after a timeout.

    seconds: time for one comparison of two formulas. An answer that takes longer is wrong (and counted in `timeouts`):
    nothing that takes seconds of computer algebra to compare was written as a final answer. Thread-safe.
    """

    def __init__(self, seconds: float = 5.0):
        if importlib.util.find_spec("math_verify") is None:
            raise EnvConfigError("jsonl_math needs the package math-verify: pip install 'rllib-llm[tasks]'")
        self.seconds = seconds
        self.timeouts = 0
        self._comparison = Comparison(self._math_equal)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def equal(self, gold: str, answer: str, compare: str = "auto") -> bool:
        """Whether `answer` is the right one where `gold` is, see `comparison`. Raises `MathCheckError`."""
        return self._comparison.equal(gold, answer, compare)

    def _math_equal(self, gold: str, answer: str, prose: bool) -> bool:
        with self._lock:
            process = self._running()
            reply = self._ask(process, {"gold": gold, "answer": answer, "prose": prose}, self.seconds)
            if reply is None:
                self.timeouts += 1
                self._kill()
                return False
        if "error" in reply:
            raise MathCheckError(f"math-verify failed comparing {answer!r} with {gold!r}: {reply['error']}")
        return bool(reply["equal"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # -P: the directory of the worker (this package) must not shadow modules of the libraries it imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._ask(self._process, _FIRST, STARTUP_SECONDS) != {"equal": True}:
                self._kill()
                raise MathCheckError(
                    f"the math-verify process did not start; try: {sys.executable} -P {_WORKER} and "
                    f'type {{"gold": "1", "answer": "1", "prose": false, "seconds": 60}}'
                )
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], request: dict[str, str | bool], seconds: float
    ) -> dict[str, object] | None:
        """The reply, or None after `seconds` or when the process ended (an answer that needs > 4 GiB kills it)."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, received = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            try:
                process.stdin.write(json.dumps({**request, "seconds": seconds}).encode() + b"\n")
                process.stdin.flush()
                while not received.endswith(b"\n"):
                    if not selector.select(max(0.0, deadline - time.monotonic())):
                        return None
                    chunk = os.read(process.stdout.fileno(), 65536)
                    if not chunk:
                        return None
                    received += chunk
            except BrokenPipeError:
                return None
        reply: dict[str, object] = json.loads(received)
        return reply

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(
                        BrokenPipeError
                    ):  # unsent bytes of the request it was killed for
                        pipe.close()
            self._process = None

    def close(self) -> None:
        with self._lock:
            self._kill()


@lru_cache(maxsize=8)
def shared_checker(seconds: float) -> MathChecker:
    """One helper per process and timeout, shared by the train and eval factories."""
    return MathChecker(seconds)
