"""Experiments from YAML files and `key.path=value` overrides, checked as a whole.

OmegaConf reads YAML, merges overrides and resolves interpolations; `settings.read` checks the types, because OmegaConf
stops at the first problem and knows neither `Literal` nor tuples.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.resources
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # PyYAML is what OmegaConf reads with; needed for its errors
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from precision_policies.errors import MISSING, Violation, shorten
from rllib_llm.errors import violations_of
from rllib_llm.experiment.environment import only_allowed_variables
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.sections import Experiment
from rllib_llm.settings.groups import SECTIONS
from rllib_llm.settings.names import SHORTHANDS, all_keys
from rllib_llm.settings.read import plain, read

__all__ = ["experiment_from_dict", "known_keys", "load_experiment", "shipped_experiments"]


def load_experiment(source: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a config file (or the name of a shipped one) and apply overrides.

    `key.path=value` merges a mapping into the file's; `key.path:=value` replaces it. Another `env.name` drops the
    file's `env.config`, which is another environment's.

    Raises ExperimentError listing every malformed override, unknown key and ill-typed value.
    """
    path = _find(source)
    try:
        base = _normalised(_read(path, str(source)))
        changes = _overrides(overrides)
        found = changes.found
        for replaced in [*changes.replaced, *_of_another_env(base, changes.tree)]:
            _remove(base, replaced.split("."))
        merged = OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(changes.tree))
        missing = sorted(OmegaConf.missing_keys(merged))  # "???" in the file
        for key in missing:
            found.append(Violation(key, MISSING, "must be given", f"{key}=VALUE"))
            OmegaConf.update(merged, key, None)
        unread: list[Violation] = []
        with only_allowed_variables(unread):
            data = OmegaConf.to_container(merged, resolve=True)
        if unread:  # the values that they stand for are unknown, so nothing else is said of them
            raise ExperimentError(str(source), [*found, *unread])
    except OmegaConfBaseException as error:
        raise ExperimentError(str(source), [_plain_text(error)]) from error
    except TypeError as error:
        problem, remedy = f"an override changes part of a list ({error})", "give it whole: key='[0.9, 0.99]'"
        raise ExperimentError(str(source), [Violation("", None, problem, remedy)]) from error
    data = typing.cast(dict[str, Any], data)
    data.setdefault("name", path.stem)
    return experiment_from_dict(data, str(source), found, missing)


def experiment_from_dict(
    data: Mapping[str, Any],
    source: str = "config",
    found: Sequence[Violation] = (),
    missing: Sequence[str] = (),
) -> Experiment:
    """The typed experiment of a nested dict. missing: keys that `found` says must be given.

    Raises ExperimentError with what was `found` earlier, unknown keys, ill-typed values and those out of range, and,
    where there are any of those, also with what is wrong with the combinations of the others: everything in one round.
    """
    all_found, bad = list(found), _settings_of(missing)
    experiment = read(Experiment, _normalised(data), "", all_found, bad)
    if all_found:
        raise ExperimentError(source, all_found + _further(experiment, bad))
    return experiment


def shipped_experiments() -> dict[str, Path]:
    """Configs inside the package, by name."""
    folder = Path(str(importlib.resources.files("rllib_llm.shipped_configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def known_keys() -> list[tuple[str, str, str, str]]:
    """(key, default, allowed values, meaning) of every setting, in the order of the sections."""
    return [
        (
            key.name,
            json.dumps(plain(key.default)) if isinstance(key.default, (dict, tuple)) else _yaml(key.default),
            key.kind,
            key.metadata["doc"],
        )
        for key in all_keys().values()
        if key.default is not MISSING
    ]


def _yaml(value: Any) -> str:
    """A scalar as a file has it: `null`, `true`."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _plain_text(error: Exception, problem: str = "", remedy: str = "") -> Violation:
    """The error of a library in one line."""
    text = " ".join(str(error).split())
    return Violation("", None, f"{problem}: {text}" if problem else text, remedy)


def _find(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = shipped_experiments()
    if str(source) in shipped:
        return shipped[str(source)]
    near = difflib.get_close_matches(path.stem, shipped, n=1, cutoff=0.5)
    problem = f"no such file: {path.absolute()}, and no shipped config of that name ({', '.join(shipped)})"
    remedy = f"Did you mean the shipped config {near[0]!r}?" if near else "name a file, or one of these"
    raise ExperimentError(str(source), [Violation("", None, problem, remedy)])


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(source, [_plain_text(error, "cannot be read as UTF-8 text")]) from error
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        ValueError,
    ) as error:  # ValueError: a number of 5 000 digits
        raise ExperimentError(source, [_plain_text(error, "not valid YAML")]) from error
    data = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(data, dict):
        problem = f"the file must hold a mapping with the sections {', '.join(SECTIONS)}"
        raise ExperimentError(source, [Violation("", None, problem)])
    return typing.cast(dict[str, Any], data)


@dataclass(frozen=True)
class _Overrides:
    """tree: nested values. replaced: keys given with `:=`. found: texts that are no overrides."""

    tree: dict[str, Any] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    found: list[Violation] = field(default_factory=list)


def _overrides(texts: Iterable[str]) -> _Overrides:
    """`key.path=value` texts; a value is YAML, so `[1, 2]`, `null` and `2e-4` mean that; see `_value`."""
    good, out = [], _Overrides()
    for text in texts:
        key, equals, value = text.partition("=")
        replaces = key.endswith(":")
        key = SHORTHANDS.get(key.removesuffix(":"), key.removesuffix(":"))
        if not equals or not key.strip() or key.startswith("-"):
            remedy = "write key.path=value, for example train.lr=2e-4"
            out.found.append(Violation("", None, f"{shorten(text)} is not an override", remedy))
            continue
        try:
            value = _value(value)
            OmegaConf.from_dotlist([f"{key}={value}"])
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            problem, remedy = f"{shorten(text)}: the value is not YAML", "in a shell, quote it: 'key={a: 1}'"
            out.found.append(_plain_text(error, problem, remedy))
            continue
        good.append(f"{key}={value}")
        if replaces:
            out.replaced.append(key)
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(good), resolve=False)
    out.tree.update(_normalised(typing.cast(dict[str, Any], tree)))
    return out


_NOT_IN_A_LINE = (
    yaml.AnchorToken,
    yaml.AliasToken,
    yaml.TagToken,
    yaml.DirectiveToken,
    yaml.DocumentStartToken,
    yaml.DocumentEndToken,
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
)


def _value(text: str) -> str:
    """`text`, quoted where YAML would not read it as one value of one line: a comment, an anchor, `key: value`, `|`.

    YAML reads `####` as null, `&x y` as `y`, and `Answer:` as a mapping. On a command line each is the text itself;
    lists and mappings are written `[1, 2]` and `{a: 1}`. A value of several lines is YAML as it stands.

    Raises:
        yaml.YAMLError: no YAML.
    """
    if "\n" in text.strip():
        return text
    rest, as_text = text, False
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        start, end = token.start_mark.index, token.end_mark.index
        rest = rest[:start] + " " * (end - start) + rest[end:]
        block = isinstance(token, yaml.ScalarToken) and token.style in ("|", ">")
        as_text |= block or isinstance(token, _NOT_IN_A_LINE)
    return json.dumps(text, ensure_ascii=False) if as_text or rest.strip() else text


def _of_another_env(base: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """`env.config`, where the overrides name another environment than the file."""
    before, after = base.get("env"), changes.get("env")
    if not isinstance(after, Mapping) or "name" not in after:
        return []
    name = before.get("name", Experiment().env.name) if isinstance(before, Mapping) else None
    return ["env.config"] if after["name"] != name else []


def _remove(tree: Any, path: Sequence[str]) -> None:
    for part in path[:-1]:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        tree.pop(path[-1], None)


def _normalised(data: Mapping[str, Any]) -> dict[str, Any]:
    """`precision: bf16` means `precision: {policy: bf16}`; likewise `model: DIR` and `env: NAME`."""
    out = dict(data)
    for section, path in SHORTHANDS.items():
        if section in out and not isinstance(out[section], Mapping):
            out[section] = {path.partition(".")[2]: out[section]}
    return out


# ---- checking --------------------------------------------------------------------------------------------------------


def _settings_of(keys: Iterable[str]) -> set[str]:
    """The settings in which these keys lie: `env.config` for `env.config.path`."""
    return {name for key in keys for name in all_keys() if key == name or f"{key}.".startswith(f"{name}.")}


def _further(experiment: Experiment, bad: set[str]) -> list[Violation]:
    """What is wrong with an experiment in which the settings `bad` have their defaults, without those."""
    from rllib_llm.experiment.rules import unusable_parts

    found: list[Violation] = []
    with contextlib.suppress(
        Exception
    ):  # of an environment's own code: what was found before must reach the reader
        found += experiment.violations(bad)
    return [
        *found,
        *(violation for error in unusable_parts(experiment) for violation in violations_of(error)),
    ]
