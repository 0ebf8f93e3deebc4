"""Reading an env's configuration: every wrong key of a section is reported at once, with what is possible instead."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rllib_llm.envs.protocol import EnvConfigError, describe_error


class Section:
    """A dict of options being read: `take` each known key, then `finish` — which raises with ALL problems found.

    `where` is the dotted path used in messages, e.g. "env.config.answer".
    """

    def __init__(self, values: Mapping[str, Any] | None, where: str):
        self.where = where
        self.problems: list[str] = []
        self._known: list[str] = []
        if values is not None and not isinstance(values, Mapping):
            raise EnvConfigError(f"{where} must be a mapping of options, got {values!r}")
        self._values = dict(values or {})

    def take(
        self,
        key: str,
        default: Any,
        kind: type | tuple[type, ...],
        test: Callable[[Any], bool] | None = None,
        expects: str = "",
    ) -> Any:
        """Value of `key`, or `default` when absent; a wrong type or failing `test` is noted, `default` returned."""
        self._known.append(key)
        if key not in self._values:
            return default
        value = self._values[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        is_bool_by_mistake = isinstance(value, bool) and bool not in kinds
        if is_bool_by_mistake or not isinstance(value, kinds) or (test is not None and not test(value)):
            names = expects or " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            self.problem(key, f"= {value!r}: expected {names}")
            return default
        return value

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        options = sorted(choices)
        value: str = self.take(key, default, str, lambda v: v in options, f"one of {', '.join(options)}")
        return value

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{self.where}.{key} {text}")

    def include(self, key: str, build: Callable[[], Any], default: Any = None) -> Any:
        """Result of `build()`; an `EnvConfigError` inside it is added to this section's problems."""
        try:
            return build()
        except EnvConfigError as error:
            self.problems.append(str(error))
            return default

    def finish(self) -> None:
        for key in self._values:
            if key not in self._known:
                close = difflib.get_close_matches(str(key), self._known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                self.problem(
                    str(key), f"is not an option here; {hint}options: {', '.join(sorted(self._known))}"
                )
        if self.problems:
            raise EnvConfigError("\n".join(self.problems))


def import_object(path: str, where: str) -> Any:
    """Object named "package.module:Name"; the error says which of the two parts is missing."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise EnvConfigError(f"{where} = {path!r}: expected 'package.module:Name'")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may do anything when it is imported
        if not isinstance(error, ImportError):
            raise EnvConfigError(
                f"{where} = {path!r}: importing {module_name!r} raised {describe_error(error)}"
            ) from error
        raise EnvConfigError(
            f"{where} = {path!r}: cannot import {module_name!r} ({error}); is its directory on "
            f"PYTHONPATH, for the Ray workers too?"
        ) from error
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise EnvConfigError(f"{where} = {path!r}: module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)
