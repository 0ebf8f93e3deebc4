"""Deliberate errors: one base, and one class that the command line takes for bad input."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from precision_policies.errors import InputError, PolicyError
from rllib_llm.cli import main
from rllib_llm.errors import RllibLLMError

ROOT = Path(__file__).resolve().parents[2] / "rllib_llm"


def error_classes():
    """(file, name) of every exception class that a file of rllib_llm defines."""
    known = {"Exception", "ValueError", "RuntimeError", "ImportError", "TypeError", "KeyError", "OSError"}
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if bases & known or any(base.endswith(("Error", "Halt")) for base in bases):
                    yield file, node.name


CLASSES = list(error_classes())


@pytest.mark.parametrize(("file", "name"), CLASSES, ids=[f"{f.relative_to(ROOT)}:{n}" for f, n in CLASSES])
def test_every_deliberate_error_has_the_one_base(file, name):
    """A class of its own without the base would reach users as a traceback, or be caught by nobody."""
    module = ".".join(("rllib_llm", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    assert issubclass(getattr(importlib.import_module(module), name), RllibLLMError)


def test_there_are_errors_to_look_at():
    """The walk above finds what it is for."""
    assert len(CLASSES) > 25


class Refused(RllibLLMError, InputError, RuntimeError):
    """An input error that nobody has heard of."""


@pytest.mark.parametrize("error", [Refused("no"), PolicyError("policy", [])])
def test_bad_input_of_any_kind_is_status_two(error, monkeypatch, capsys):
    """The command line knows the one class, no list of classes."""
    monkeypatch.setattr("rllib_llm.cli.commands._config_list", raising(error))
    assert main(["config", "list"]) == 2
    assert capsys.readouterr().err == f"rllib-llm: {error}\n"


@pytest.mark.parametrize("error", [RllibLLMError("it broke"), ValueError("a bug")])
def test_what_broke_while_it_ran_keeps_its_traceback(error, monkeypatch):
    """Neither a fault of the program nor a part that failed is called bad input."""
    monkeypatch.setattr("rllib_llm.cli.commands._config_list", raising(error))
    with pytest.raises(type(error)):
        main(["config", "list"])


def raising(error):
    def run(arguments):
        raise error

    return run
