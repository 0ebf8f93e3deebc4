"""Environments by name, class, or "package.module:Class"."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from rllib_llm.envs.checks import import_object
from rllib_llm.envs.protocol import SPLITS, EnvConfigError, Split, TextEnv, TextEnvFactory

_REGISTERED: dict[str, type] = {}


def register_text_env(name: str, cls: type) -> None:
    """Make `cls` available as `env=name`.

    cls is one of two things, both constructed as cls(config, split=…, seed=…): a `TextEnv` (has `reset` and `step`;
    one instance per episode that is played at the same time), or a `TextEnvFactory` (called without arguments gives a
    TextEnv), for environments that share data or a curriculum. Registering another class under a taken name raises
    ValueError. In Ray workers a registration exists only where it was made: "package.module:Class" works everywhere.
    """
    _check_class(name, cls)
    if _REGISTERED.get(name, cls) is not cls:
        raise ValueError(f"env name {name!r} is taken by {_REGISTERED[name].__qualname__}; choose another")
    _REGISTERED[name] = cls


def registered_envs() -> dict[str, type]:
    """Name -> class, sorted by name; the first line of a class's docstring says what it is."""
    return dict(sorted(_REGISTERED.items()))


def make_env(
    env: str | type, config: Mapping[str, Any] | None = None, split: Split = "train", seed: int = 0
) -> TextEnvFactory:
    """Factory of environments for one split.

    env: registered name, class, or "package.module:Class". config: the env's options. seed: order of the problems.
    Train and eval of the same env and config never share a problem, whatever the seeds.
    Raises `EnvConfigError` (all wrong keys at once), also for unknown names.
    """
    if split not in SPLITS:
        raise EnvConfigError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    cls = resolve_env(env)
    options = dict(config or {})
    if _is_env_class(cls):
        return ClassFactory(cls, options, split, seed)
    return cast(TextEnvFactory, cls(options, split=split, seed=seed))


def resolve_env(env: str | type) -> type:
    """The class that `env` names. Raises `EnvConfigError`."""
    if isinstance(env, type):
        _check_class(env.__qualname__, env)
        return env
    if not isinstance(env, str):
        raise EnvConfigError(f"env = {env!r}: expected a name, a class or 'package.module:Class'")
    if ":" in env:
        cls = import_object(env, "env")
        _check_class(env, cls)
        return cast(type, cls)
    if env not in _REGISTERED:
        close = difflib.get_close_matches(env, _REGISTERED, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise EnvConfigError(
            f"env = {env!r} is not registered; {hint}registered: {', '.join(sorted(_REGISTERED))}; "
            f"your own: 'package.module:Class'"
        )
    return _REGISTERED[env]


class ClassFactory:
    """Factory around a user's `TextEnv` class: one instance per call, no shared state."""

    def __init__(self, cls: type, config: dict[str, Any], split: Split, seed: int):
        self.cls, self.config, self.split, self.seed = cls, config, split, seed

    def __call__(self) -> TextEnv:
        return cast(TextEnv, self.cls(self.config, split=self.split, seed=self.seed))

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.cls.__qualname__} keeps no state, got keys {sorted(state)}")

    @property
    def num_problems(self) -> int | None:
        return None


def _is_env_class(cls: type) -> bool:
    return callable(getattr(cls, "reset", None)) and callable(getattr(cls, "step", None))


def _check_class(name: str, cls: Any) -> None:
    if not isinstance(cls, type):
        raise EnvConfigError(f"env {name!r} is {cls!r}, not a class")
    # hasattr(cls, "__call__") is true of every class: its metaclass has one.
    is_factory = all(
        any(m in vars(base) for base in cls.__mro__) for m in ("__call__", "get_state", "set_state")
    )
    if not _is_env_class(cls) and not is_factory:
        raise EnvConfigError(
            f"env {name!r}: class {cls.__qualname__} is neither a TextEnv (reset, step) nor a "
            f"TextEnvFactory (__call__, get_state, set_state)"
        )
    try:
        inspect.signature(cls).bind({}, split="train", seed=0)
    except TypeError as error:
        raise EnvConfigError(
            f"env {name!r}: {cls.__qualname__} must be constructible as "
            f"{cls.__qualname__}(config, split=…, seed=…): {error}"
        ) from error
