"""How `GRPOConfig` holds a section: a plain dict in the instance, and a fluent method of the same name.

RLlib copies, pickles and searches plain dicts well. `config.rollout(temperature=0.7)` sets,
`config.rollout["temperature"]` reads, and `config.to_dict()["rollout"]["temperature"]` is what Tune and MLflow see:
one name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray.rllib.models.catalog import MODEL_DEFAULTS

from precision_policies.errors import Violation
from rllib_llm.errors import SettingsError
from rllib_llm.settings.names import unknown

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["SectionView", "TrainAttribute", "known_keywords", "section"]

_RLLIB_CHECKS = "_value_error"
"""In a config's dict while RLlib's own `validate` runs (see `GRPOConfig.validate`)."""

F = TypeVar("F", bound=Callable[..., Any])


class SectionView(Mapping[str, Any]):
    """A section's values to read; called, the fluent method that sets some."""

    def __init__(self, config: GRPOConfig, name: str, method: Callable[..., Any] | None):
        self._config, self._name, self._method = config, name, method
        if method is not None:
            functools.update_wrapper(self, method)
            signature = inspect.signature(method)
            self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *arguments: Any, **settings: Any) -> GRPOConfig:
        if self._method is None:
            raise TypeError(f"set values of section {self._name!r} with .training(...)")
        return cast("GRPOConfig", self._method(self._config, *arguments, **settings))

    def _values(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self._config.__dict__[self._name])

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return f"{self._name}: {dict(self)!r}"


class _ModelView(SectionView):
    """`config.model` is a dict of old-stack models to RLlib, whose checks read some of its entries."""

    def __getitem__(self, key: str) -> Any:
        values = self._values()
        return values[key] if key in values else MODEL_DEFAULTS[key]


class _Section:
    """A data descriptor: it is found before the instance's dict, where the values lie under the same name."""

    def __init__(self, name: str, method: Callable[..., Any] | None):
        self._name, self._method = name, method
        self._view = _ModelView if name == "model" else SectionView

    def __get__(self, config: GRPOConfig | None, owner: type) -> Any:
        if config is None:
            return self._method or self
        if self._name == "model" and _RLLIB_CHECKS in config.__dict__:
            return dict(MODEL_DEFAULTS)  # it would warn of a model of the old stack
        return self._view(config, self._name, self._method)

    def __set__(self, config: GRPOConfig, value: Any) -> None:
        config.__dict__[self._name] = dict(value) if isinstance(value, Mapping) else value


def section(name: str) -> Callable[[F], F]:
    """Makes a method the fluent one of section `name`; an unknown keyword is a SettingsError that knows the right one.

    The decorated name has the method's type, so that an editor shows its keywords.
    """

    def decorate(method: F) -> F:
        return cast(F, _Section(name, known_keywords(name)(method)))

    return decorate


def held(name: str) -> Any:
    """The descriptor of a section whose fluent method has another name."""
    return _Section(name, None)


def known_keywords(name: str, *further: str) -> Callable[[F], F]:
    """Refuses, with the closest setting, keywords that the method of section `name` does not take.

    further: keywords that it takes although its signature does not list them.
    """

    def decorate(method: F) -> F:
        known = {*inspect.signature(method).parameters, *further}

        @functools.wraps(method)
        def checked(*arguments: Any, **settings: Any) -> Any:
            wrong: list[Violation] = [
                unknown(f"{name}.{key}", value) for key, value in settings.items() if key not in known
            ]
            if wrong:
                raise SettingsError(f"GRPOConfig.{method.__name__}()", wrong)
            return method(*arguments, **settings)

        return cast(F, checked)

    return decorate


class TrainAttribute:
    """An attribute that RLlib reads, and that lies in section `train`: there is one place and one name for it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: GRPOConfig | None, owner: type) -> Any:
        return self if config is None else config.__dict__["train"][self._name]

    def __set__(self, config: GRPOConfig, value: Any) -> None:
        config.__dict__["train"] = {**config.__dict__.get("train", {}), self._name: value}
