"""Turn nested results and configs into names and values that an MLflow store accepts.

Limits are those of ``mlflow.utils.validation`` (3.17): a key has at most 250 characters of ``[\\w./\\- ]`` and must be
a normalised path; a parameter value has at most 6000 characters, a tag value 8000; one batch holds at most 100
parameters, 100 tags and 1000 metrics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

MAX_KEY = 250
MAX_PARAM_VALUE = 6000
MAX_TAG_VALUE = 8000
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000

# What Tune and RLlib repeat in every result and no reader plots: the config echo and the names of the process.
RESULT_NOISE = frozenset(
    {"config", "pid", "hostname", "node_ip", "trial_id", "experiment_id", "date", "timestamp", "done"}
    | {
        "should_checkpoint",
        "checkpoint_dir_name",
        "iterations_since_restore",
        "time_since_restore",
        "hist_stats",
    }
    | {"samples", "attestations"}  # text, which becomes artefacts
)

T = TypeVar("T")


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` → ``{"a/b": 1}``. Lists and tuples stay values; an empty mapping is the value ``{}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}/"))
        else:
            flat[name] = value
    return flat


def clean_key(key: str) -> str:
    """The nearest name that MLflow accepts: ``timers/env[0]//step%`` → ``timers/env_0_/step_``."""
    parts = [part for part in re.sub(r"[^\w./\- ]", "_", key[:MAX_KEY]).split("/") if part]
    name = "/".join(
        "_" if part.strip(".") == "" else part for part in parts
    )  # "." and ".." would resolve elsewhere
    return name or "_"


def clean_keys(flat: Mapping[str, T]) -> dict[str, T]:
    """``clean_key`` for all, with ``_2``, ``_3`` … appended where two keys would become one."""
    cleaned: dict[str, T] = {}
    for key, value in flat.items():
        name, base, n = clean_key(key), clean_key(key), 1
        while name in cleaned:
            n += 1
            name = f"{base[: MAX_KEY - len(str(n)) - 1]}_{n}"
        cleaned[name] = value
    return cleaned


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a Tune result, flattened and renamed.

    RLlib reports NaN for every metric that nobody logged in an iteration, so a NaN is an absent value, not a
    measurement, and makes no row.
    """
    kept = {key: value for key, value in result.items() if key not in RESULT_NOISE}
    numbers: dict[str, float] = {}
    for key, value in flatten(kept).items():
        if isinstance(value, (str, bytes, list, tuple, dict)) or value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number):
            numbers[key] = number
    return clean_keys(numbers)


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """A nested config as parameter strings within MLflow's limits; a cut value ends in ``…``.

    A setting has its dotted name, ``train.lr``, also where a search names it ``train/lr``.
    """
    named = {key.replace("/", "."): value for key, value in flatten(config).items()}
    return {key: cut(as_text(value), MAX_PARAM_VALUE) for key, value in clean_keys(named).items()}


def as_text(value: Any) -> str:
    """JSON for plain data, the qualified name for classes and functions, ``str`` for the rest."""
    if isinstance(value, str):
        return value
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def jsonable(tree: Any) -> Any:
    """The same tree with every leaf that JSON does not know replaced by its text."""
    if isinstance(tree, Mapping):
        return {str(key): jsonable(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple, set, frozenset)):
        return [jsonable(value) for value in tree]
    if tree is None or isinstance(tree, (str, int, float, bool)):
        return tree
    return as_text(tree)


def cut(text: str, limit: int) -> str:
    """``text`` with at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Successive lists of at most ``size`` items."""
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def changed(
    before: Mapping[str, str], after: Mapping[str, str], wanted: Callable[[str], bool]
) -> dict[str, str]:
    """Entries of ``after`` that are new or differ from ``before``, of the wanted keys."""
    return {key: value for key, value in after.items() if wanted(key) and before.get(key) != value}
