"""In which state an engine is, and what each state refuses: every engine holds one `EngineState`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rllib_llm.engines.base import NO_WEIGHTS
from rllib_llm.errors import EngineError

__all__ = ["EngineState", "require_idle", "require_sleep_level"]


@dataclass
class EngineState:
    """Whether an engine is open, awake, paused, and which weights it has; each `require_*` raises EngineError.

    Attributes:
        version: of the weights; `NO_WEIGHTS` before the first, and after an update that broke off.
        asleep, paused, closed: as `sleep`, `pause` and `close` left them.
    """

    version: int = NO_WEIGHTS
    asleep: bool = False
    paused: bool = False
    closed: bool = False

    def require_open(self) -> None:
        """The engine was not closed, and the process that it runs in has not ended."""
        if self.closed:
            raise EngineError("the engine is closed: make a new one")

    def require_awake(self) -> None:
        """Open, and not put to sleep."""
        self.require_open()
        if self.asleep:
            raise EngineError("the engine sleeps: call wake() first")

    def require_weights(self) -> None:
        """Awake, and there are weights to sample with."""
        self.require_awake()
        if self.version == NO_WEIGHTS:
            raise EngineError(
                "the engine has no weights yet: call update_weights() with an export of the learner first"
            )

    def require_sampling(self) -> None:
        """`generate` may sample now: not paused."""
        if self.paused:
            raise EngineError(
                "the engine is paused: call resume() first; submit() may queue requests meanwhile"
            )

    def close(self) -> None:
        """Nothing is held any more."""
        self.closed, self.version = True, NO_WEIGHTS


def require_sleep_level(level: int) -> None:
    """ValueError for a level of `RolloutEngine.sleep` that there is not."""
    if level not in (1, 2):
        raise ValueError(
            f"sleep(level={level}): 1 drops the KV cache and parks the weights in host memory, 2 drops both"
        )


def require_idle(pending: Iterable[Any]) -> None:
    """EngineError if requests are pending; it names them."""
    names = [str(request) for request in pending]
    if names:
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        raise EngineError(
            f"{len(names)} submitted request(s) are pending ({shown}): collect or abort them first; the tokens of a "
            "completion are all of one weights version"
        )
