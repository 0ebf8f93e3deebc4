"""Requests that vLLM samples while its caller does something else: a thread of the engine's process steps it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rllib_llm.errors import EngineError


class Background:
    """Steps an in-process `vllm.LLMEngine` as long as requests are unfinished.

    Only this thread and the methods here touch the engine while requests are pending; a lock keeps them apart, so a
    method waits for at most one step.

    Args:
        engine: `vllm.LLMEngine`.
        convert: a finished `vllm.CompletionOutput` -> what `collect` returns; may raise EngineError.
    """

    def __init__(self, engine: Any, convert: Callable[[Any], Any]) -> None:
        self._engine, self._convert = engine, convert
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._finished: dict[str, Any] = {}
        self._failure: BaseException | None = None
        self._paused = False
        self._lost: set[str] = set()  # what `_failure` ended, as long as nobody was told
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> list[str]:
        """Requests that are not finished, or finished and not collected."""
        with self._changed:
            return sorted({*self._running, *self._finished})

    def pause(self) -> None:
        """Take no further step until `resume`; returns between two steps."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Step again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def submit(self, requests: Sequence[tuple[str, Any, Any]]) -> None:
        """Begin requests (id, prompt, `vllm.SamplingParams` whose outputs come once, at the end).

        Raises:
            EngineError: a step or a conversion failed before; all requests are lost.
        """
        with self._changed:
            self._raise_failure()
            for name, prompt, params in requests:
                self._engine.add_request(name, prompt, params)
                self._running.add(name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm-steps", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """Requests that have finished since the last call; waits for one, at most `timeout_s` seconds, unless paused.

        Raises:
            EngineError: a step or a conversion failed; all requests are lost.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._running and not (self._finished or self._failure or self._paused):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._raise_failure()
            finished, self._finished = self._finished, {}
            return finished

    def abort(self, names: Sequence[str]) -> None:
        """End requests; those that have finished meanwhile are dropped."""
        with self._changed:
            running = [n for n in names if n in self._running]
            if running:
                self._engine.abort_request(running)
            self._running -= set(running)
            for name in names:
                self._finished.pop(name, None)
            self._lost -= set(names)
            if not self._lost:
                self._failure = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._lost.clear()
            raise EngineError(f"vLLM failed while it sampled: {failure}") from failure

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._paused or not self._running:
                        if not self._changed.wait(60.0) and not self._running:
                            self._thread = None  # `submit` starts another one
                            return
                    self._step()
                time.sleep(0)  # let a method that waits for the lock have it
        except BaseException as error:
            with self._changed:
                self._thread = None
                self._failure = error
                running, self._running = list(self._running), set()
                self._lost = {*running, *self._finished}
                self._finished.clear()
                self._abort_quietly(running)
                self._changed.notify_all()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self._running:
                self._running.discard(output.request_id)
                self._finished[output.request_id] = self._convert(output.outputs[0])
                self._changed.notify_all()

    def _abort_quietly(self, names: list[str]) -> None:
        try:
            self._engine.abort_request(names)
        except Exception:  # the failure that brought us here is the one to report
            return
