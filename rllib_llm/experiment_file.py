"""Experiments from YAML files and `key.path=value` overrides, checked as a whole.

OmegaConf reads YAML, merges overrides and resolves interpolations; the types are checked here, because OmegaConf stops
at the first problem and knows neither `Literal` nor tuples.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml  # PyYAML is what OmegaConf reads with; needed for its errors
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rllib_llm.algorithm.settings import (
    ModelSettings,
    PrecisionSettings,
    RolloutSettings,
    describe,
    parse,
    parse_rest,
)
from rllib_llm.experiment import (
    EnvSettings,
    EvaluationSettings,
    Experiment,
    ExperimentError,
    ResourceSettings,
    RunSettings,
    TrackingSettings,
    TrainSettings,
)

__all__ = ["experiment_from_dict", "known_keys", "load_experiment", "shipped_experiments"]


def load_experiment(source: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a config file (or the name of a shipped one) and apply `key.path=value` overrides.

    Raises ExperimentError listing every malformed override, unknown key and ill-typed value.
    """
    path = _find(source)
    try:
        base = _normalised(_read(path, str(source)))
        changes, problems = _dotlist(overrides)
        merged = OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(changes))
        missing = sorted(OmegaConf.missing_keys(merged))  # "???" in the file
        for key in missing:
            problems.append(f"{key} must be given: {key}=VALUE.")
            OmegaConf.update(merged, key, None)
        data = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ExperimentError(str(source), [" ".join(str(error).split())]) from error
    except TypeError as error:
        problem = f"an override changes part of a list ({error}); give it whole: key='[0.9, 0.99]'."
        raise ExperimentError(str(source), [problem]) from error
    data = typing.cast(dict[str, Any], data)
    data.setdefault("name", path.stem)
    return experiment_from_dict(data, str(source), problems, missing)


def experiment_from_dict(
    data: Mapping[str, Any],
    source: str = "config",
    problems: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> Experiment:
    """The typed experiment of a nested dict. missing: keys that `problems` say must be given.

    Raises ExperimentError with `problems` found earlier, unknown keys and ill-typed values, and, where there are any of
    those, also with what is wrong with the values that could be read: everything in one round.
    """
    found, bad = list(problems), set(missing)
    built = _build(Experiment, _normalised(data), "", found, bad)
    if found:
        raise ExperimentError(source, found + _wrong_values(built, bad))
    return built


def shipped_experiments() -> dict[str, Path]:
    """Configs inside the package, by name."""
    folder = Path(str(importlib.resources.files("rllib_llm.shipped_configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


# ---- reading ---------------------------------------------------------------------------------------------------------


def _find(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = shipped_experiments()
    if str(source) in shipped:
        return shipped[str(source)]
    near = difflib.get_close_matches(path.stem, shipped, n=1, cutoff=0.5)
    hint = f" Did you mean the shipped config {near[0]!r}?" if near else ""
    raise ExperimentError(
        str(source),
        [
            f"no such file: {path.absolute()}, and no shipped config of that name ({', '.join(shipped)}).{hint}"
        ],
    )


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(source, [f"cannot be read as UTF-8 text: {error}"]) from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ExperimentError(source, [f"not valid YAML: {' '.join(str(error).split())}"]) from error
    data = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(data, dict):
        raise ExperimentError(
            source, [f"the file must hold a mapping with the sections {', '.join(_sections())}."]
        )
    return typing.cast(dict[str, Any], data)


def _dotlist(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """(nested dict, problems) of `key.path=value` texts; a value is YAML, so `[1, 2]`, `null` and `2e-4` mean that."""
    good, problems = [], []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip() or key.startswith("-"):
            problems.append(f"{text!r} is not an override; write key.path=value, for example train.lr=2e-4.")
            continue
        override = f"{_SHORTHANDS.get(key, key)}={text.partition('=')[2]}"
        try:
            OmegaConf.from_dotlist([override])
            good.append(override)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            reason = " ".join(str(error).split())
            problems.append(
                f"{text!r}: the value is not YAML ({reason}); in a shell, quote it: 'key={{a: 1}}'."
            )
    changes = OmegaConf.to_container(OmegaConf.from_dotlist(good), resolve=False)
    return typing.cast(dict[str, Any], changes), problems


_SHORTHANDS = {"precision": "precision.policy", "model": "model.path", "env": "env.name"}


def _normalised(data: Mapping[str, Any]) -> dict[str, Any]:
    """`precision: bf16` means `precision: {policy: bf16}`; likewise `model: DIR` and `env: NAME`."""
    out = dict(data)
    for section, path in _SHORTHANDS.items():
        if section in out and not isinstance(out[section], Mapping):
            out[section] = {path.partition(".")[2]: out[section]}
    return out


# ---- checking --------------------------------------------------------------------------------------------------------


def _sections(cls: type = Experiment) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _wrong_values(experiment: Experiment, bad: set[str]) -> list[str]:
    """Problems of an experiment in which the keys `bad` have their defaults, without those that speak of them."""
    from rllib_llm.experiment_rules import unusable_parts

    found: list[str] = []
    try:
        experiment.to_grpo_config()
    except ExperimentError as error:
        found += error.problems
    except Exception:  # of an environment's own code, say: the problems found before must reach the reader
        pass
    found += map(str, unusable_parts(experiment))
    sections = {key.partition(".")[0] for key in bad}
    # a key in full, or its last part alone: `path` of one section says nothing of `path` of another
    named = [rf"(?<![\w.])(?:{re.escape(key)}|{re.escape(key.rpartition('.')[2])})(?!\w)" for key in bad]
    return [
        text
        for text in found
        if text.partition(":")[0] not in sections and not any(re.search(name, text) for name in named)
    ]


def _build(cls: type, data: Mapping[str, Any], prefix: str, problems: list[str], bad: set[str]) -> Any:
    """An instance of dataclass `cls`; adds one sentence per problem, and keys whose default stands for a bad value."""
    hints = _sections(cls)
    nested, leaves = {}, {}
    for key, value in data.items():
        if key not in hints:
            problems.append(f"{prefix}{key} = {value!r}: no such key. {_suggest(prefix, str(key))}")
        elif not dataclasses.is_dataclass(hints[key]):
            leaves[key] = value
        elif isinstance(value, Mapping):
            nested[key] = _build(typing.cast(type, hints[key]), value, f"{prefix}{key}.", problems, bad)
        else:
            problems.append(
                f"{prefix}{key} = {value!r} must be a section with {', '.join(_sections(hints[key]))}."
            )
            bad |= {f"{prefix}{key}.{name}" for name in _sections(hints[key])}
    parsed: Any
    parsed, found = parse(_LEAVES[cls], leaves, prefix.rstrip(".") or "top level")
    if parsed is None:
        problems += found
        parsed, names = parse_rest(_LEAVES[cls], leaves)
        bad |= {f"{prefix}{name}" for name in names}
    return cls(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(_LEAVES[cls])}, **nested)


def _leaf_class(cls: type) -> type:
    """`cls` without its sections: what `parse` can check by itself."""
    hints = _sections(cls)
    kept = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(hints[f.name])]
    if len(kept) == len(dataclasses.fields(cls)):
        return cls
    specs = [
        (
            f.name,
            hints[f.name],
            field(default=f.default)
            if f.default_factory is dataclasses.MISSING
            else field(default_factory=f.default_factory),
        )
        for f in kept
    ]
    return dataclasses.make_dataclass(f"{cls.__name__}Leaves", specs, frozen=True)


def _known_paths(cls: type = Experiment, prefix: str = "") -> dict[str, str]:
    """Every key of an experiment with its type in words: ``{"train.lr": "float", …}``."""
    known: dict[str, str] = {}
    for name, hint in _sections(cls).items():
        if dataclasses.is_dataclass(hint):
            known[f"{prefix}{name}"] = "a section"
            known.update(_known_paths(typing.cast(type, hint), f"{prefix}{name}."))
        else:
            known[f"{prefix}{name}"] = describe(hint)
    return known


def known_keys() -> list[tuple[str, str, str]]:
    """(key, type in words, default) of every setting, in the order of the sections."""
    default: Any = Experiment().to_dict()
    rows = []
    for path, kind in _known_paths().items():
        value = default
        for part in path.split("."):
            value = value[part]
        if kind != "a section":
            rows.append(
                (
                    path,
                    kind,
                    json.dumps(value) if isinstance(value, (dict, list)) else str(value),
                )
            )
    return rows


# Names of the same settings in TRL, verl and vLLM.
_ELSEWHERE = {
    "learning_rate": "train.lr",
    "beta": "train.kl_coeff",
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "max_grad_norm": "train.grad_clip",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "batch_size": "rollout.prompts_per_iteration",
    "train_batch_size": "rollout.prompts_per_iteration",
    "model_name_or_path": "model.path",
    "policy": "precision.policy",
    "task": "env.name",
    "steps": "run.iterations",
    "max_steps": "run.iterations",
}


def _suggest(prefix: str, key: str) -> str:
    """The closest valid key and its type: the same name elsewhere first, then a similar one here, then anywhere."""
    known, wanted = _known_paths(), f"{prefix}{key}"
    leaf = key.rpartition(".")[2]
    same_name = [path for path in known if path.rpartition(".")[2] == leaf]
    here = [path for path in known if path.rpartition(".")[0] == prefix.rstrip(".")]
    near = (
        [_ELSEWHERE[leaf]]
        if leaf in _ELSEWHERE
        else same_name
        or difflib.get_close_matches(wanted, here, n=1, cutoff=0.6)
        or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    )
    if near:
        return f"Closest: {near[0]} ({known[near[0]]})."
    where = f"Keys of {prefix.rstrip('.')}" if prefix else "Sections"
    return f"{where}: {', '.join(path.rpartition('.')[2] for path in here)}."


_SECTION_CLASSES: tuple[type, ...] = (
    Experiment,
    PrecisionSettings,
    ModelSettings,
    RolloutSettings,
    EnvSettings,
    TrainSettings,
    EvaluationSettings,
    RunSettings,
    ResourceSettings,
    TrackingSettings,
)
_LEAVES = {cls: _leaf_class(cls) for cls in _SECTION_CLASSES}
