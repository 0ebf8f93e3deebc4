"""From a name, a file or a dict to a policy: YAML through OmegaConf, `extends`, schema versions."""

from __future__ import annotations

import functools
import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml  # PyYAML is what OmegaConf reads with; needed for its errors and its event stream
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import PolicyError, Violation, closest, shorten
from .migrations import migrate, no_version
from .policy import PrecisionPolicy
from .schema import SCHEMA_VERSION

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_EXTENDS = 16
_OWN_KEYS = ("name", "description", "extends", "schema_version")  # say who a file is; never inherited


def available() -> dict[str, Path]:
    """Shipped policies: name -> file."""
    folder = importlib.resources.files("precision_policies.shipped")
    found = {
        Path(str(entry)).stem: Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


def load_policy(source: str | os.PathLike[str] | Mapping[str, Any] | PrecisionPolicy) -> PrecisionPolicy:
    """A frozen policy from a shipped name, a YAML file (path ends in .yaml/.yml), a mapping, or a policy
    itself.

    A mapping or file may say `extends: NAME|FILE` and then only what differs: sections are merged key by key,
    lists and texts are replaced. Raises PolicyError with every violation; never returns a policy that cannot
    be.
    """
    if isinstance(source, PrecisionPolicy):
        return source
    if isinstance(source, DictConfig):
        source = _container(source, "policy", resolve=True)
    if isinstance(source, Mapping):
        # a mapping is made by the program that runs, so it may leave out the version; a file may not
        tree = _inherit({"schema_version": SCHEMA_VERSION, **source}, Path.cwd(), "mapping", ())
        tree.setdefault("name", "custom")
        return PrecisionPolicy.from_dict(tree)
    if not isinstance(source, str | os.PathLike):
        problem = "is neither a name, a path, a mapping nor a policy"
        raise PolicyError("policy", [Violation("policy", source, problem, "give one of these")])
    path = _locate(os.fspath(source), Path.cwd(), "policy", "policy")
    return _of_text(_read(path), path.parent, str(path), (str(path),), path.stem)


def from_yaml(text: str, origin: str = "text") -> PrecisionPolicy:
    """A policy from YAML text, as `to_yaml` writes it; relative `extends` start at the working directory."""
    return _of_text(parse_yaml(text, origin), Path.cwd(), origin, (), "custom")


def _of_text(
    data: dict[str, Any], folder: Path, origin: str, chain: tuple[str, ...], name: str
) -> PrecisionPolicy:
    """The policy of a file's data. Without a version it is refused, with what else is wrong if it is of today's."""
    if "schema_version" in data:
        return _of_tree(_inherit(data, folder, origin, chain), origin, name)
    found = [no_version()]
    try:
        _of_tree(_inherit({**data, "schema_version": SCHEMA_VERSION}, folder, origin, chain), origin, name)
    except PolicyError as error:
        found += error.violations
    raise PolicyError(f"policy ({origin})", found)


def _of_tree(tree: dict[str, Any], origin: str, name: str) -> PrecisionPolicy:
    tree.setdefault("name", name)
    return PrecisionPolicy.from_dict(tree, origin=origin)


def is_path(source: str) -> bool:
    """Whether a string means a file rather than a shipped name."""
    return source.endswith((".yaml", ".yml")) or "/" in source or os.sep in source


def _locate(source: str, folder: Path, subject: str, key: str) -> Path:
    if is_path(source):
        path = (folder / Path(source).expanduser()).resolve() if "\0" not in source else Path(source)
        if "\0" in source or not path.is_file():
            remedy = f"give an existing YAML file, or a shipped name: {', '.join(available())}"
            raise PolicyError(
                subject, [Violation(key, source, f"no such file ({shorten(str(path), 200)})", remedy)]
            )
        return path
    shipped = available()
    if source not in shipped:
        problem = f"no such policy{closest(source, shipped)}"
        remedy = f"use one of {', '.join(shipped)}, or a path that ends in .yaml"
        raise PolicyError(subject, [Violation(key, source, problem, remedy)])
    return shipped[source]


@functools.cache
def _read_shipped(path: Path) -> dict[str, Any]:
    return read_file(path)  # never changed by those who get it: `migrate` and `_merge` copy


def _read(path: Path) -> dict[str, Any]:
    return _read_shipped(path) if path in available().values() else read_file(path)


def read_file(path: Path) -> dict[str, Any]:
    """`parse_yaml` of a file. Raises PolicyError, also where it cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            violation = Violation(
                "file", str(path), f"is larger than {MAX_BYTES} bytes", "this is not a policy"
            )
            raise PolicyError("policy file", [violation])
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        violation = Violation("file", str(path), f"cannot be read: {error}", "give a UTF-8 text file")
        raise PolicyError("policy file", [violation]) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """Plain data of one YAML document whose root is a mapping (or of an empty one).

    Aliases (they can blow up memory), depth beyond 32 and text beyond 256 KiB are refused. Raises PolicyError.
    """
    if len(text) > MAX_BYTES:
        raise _not_yaml(origin, f"is longer than {MAX_BYTES} characters")
    try:
        if not _is_mapping(text, origin):
            return {}
        return _container(OmegaConf.create(text), origin)
    except PolicyError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        raise _not_yaml(origin, f"is not YAML that can be read: {error}") from error


def _not_yaml(origin: str, problem: str) -> PolicyError:
    return PolicyError(origin, [Violation("file", origin, problem, "correct the YAML")])


def _is_mapping(text: str, origin: str) -> bool:
    """Whether there is a document (a mapping) at all; refuses every other shape from the event stream alone."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise _not_yaml(origin, f"uses the YAML alias '*{event.anchor}', which policies do not allow")
        if isinstance(event, yaml.NodeEvent) and depth == 0:
            documents += 1
            if documents > 1:
                raise _not_yaml(origin, "holds more than one YAML document")
            if not isinstance(event, yaml.MappingStartEvent):
                raise _not_yaml(origin, "is not a mapping (lines of 'key: value')")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _not_yaml(origin, f"is nested deeper than {MAX_DEPTH}")
    return documents == 1


def _container(config: Any, origin: str, resolve: bool = False) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        raise _not_yaml(origin, f"cannot be resolved: {error}") from error
    return cast(dict[str, Any], data)


def _inherit(data: dict[str, Any], folder: Path, origin: str, chain: tuple[str, ...]) -> dict[str, Any]:
    """`data` on top of what it extends, every file first brought to the current schema version."""
    data = migrate(data, origin)
    if "extends" not in data:
        return data
    base = data.pop("extends")
    if not isinstance(base, str):
        violation = Violation(
            "extends", base, "is not a text", "name one policy or file; a policy has one parent"
        )
        raise PolicyError(f"policy ({origin})", [violation])
    path = _locate(base, folder, f"policy ({origin})", "extends")
    if str(path) in chain or len(chain) >= MAX_EXTENDS:
        problem = "extends itself" if str(path) in chain else f"is a chain of more than {MAX_EXTENDS} files"
        shown = " -> ".join([*chain, str(path)])
        raise PolicyError(
            f"policy ({origin})", [Violation("extends", base, f"{problem}: {shown}", "break the cycle")]
        )
    parent = _inherit(_read(path), path.parent, str(path), (*chain, str(path)))
    inherited = {k: v for k, v in parent.items() if k not in ("name", "description")}
    data.setdefault("description", f"{path.stem} with changes")
    return _merge(inherited, data)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
