"""The code of the README and of docs/ runs; what needs a GPU, a hub or another program is compiled and its imports
resolved."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import re
import subprocess

import pytest

from rllib_llm.cli.main import build_parser
from rllib_llm.experiment.file import load_experiment
from tests.docs.blocks import ROOT, Block, blocks, commands

# The blocks of docs/environments.md build on one another: tests/envs/test_docs.py runs them in order.
PYTHON = [block for block in blocks("python") if "environments.md" not in str(block)]
# What keeps a Python block from being run here. A block with none of these words runs.
NOT_RUN = {
    "tune.run(": "trains: the README's runs in tests/examples, the others are compiled",
    "mlflow.pyfunc": "needs a registered model: tests/registry/test_pyfunc.py makes the same calls",
    'engine="vllm"': "needs a GPU with vLLM",
    "/data/": "needs a file of the reader's",
    "# not run": "the page says so",
}
WITHOUT_PACKAGE = {"ray.air.integrations.wandb"}  # imports wandb, which the tests do not install


def runs(block: Block) -> bool:
    """Whether nothing keeps the block from being run."""
    return not any(word in block.text for word in NOT_RUN)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_compile_and_import(block: Block) -> None:
    """Each block is valid Python, and each name that it imports exists."""
    for node in ast.walk(ast.parse(block.text, block.page)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module not in WITHOUT_PACKAGE:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize("block", [block for block in PYTHON if runs(block)], ids=str)
def test_python_blocks_run(block: Block, tmp_path, monkeypatch) -> None:
    """Each block that needs nothing of the reader's runs as it is printed."""
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def test_settings_of_fluent_calls_exist() -> None:
    """Blocks that only configure `GRPOConfig` for a machine that is not here make their config: keys and types hold."""
    configured = 0
    for block in PYTHON:
        tree = ast.parse(block.text)
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and "GRPOConfig()" in ast.unparse(node)
                and "env=" not in ast.unparse(node)
            ):
                head = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
                names: dict = {}
                with contextlib.suppress(NameError):  # a value that the block computed before
                    exec(compile(ast.Module([*head, node], []), str(block), "exec"), names)
                    configured += names["config"].settings() is not None
    assert configured >= 1


@pytest.mark.parametrize("block", blocks("bash", "sh"), ids=str)
def test_shell_blocks_parse(block: Block) -> None:
    """Each shell block is valid for bash, once a placeholder such as <directory> is filled in."""
    text = block.text.replace("<directory>", "DIRECTORY")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_parse_and_their_settings_exist() -> None:
    """Each `rllib-llm` command in a shell block parses; overrides of a shipped config are settings of it. Text may
    leave arguments out: its command and options exist."""
    found = commands()
    assert len(found) > 25
    checked = 0
    for where, words in found:
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                arguments, rest = build_parser().parse_known_args(words)
        except SystemExit:
            assert ":" not in where, f"{where}: rllib-llm {' '.join(words)}"  # a shell block has a line
            exists(where, words)
            continue
        assert not [word for word in rest if word.startswith("-")], f"{where}: {rest}"
        overrides = [*getattr(arguments, "overrides", []), *rest]
        config = getattr(arguments, "config", None)
        if overrides and isinstance(config, str) and not config.endswith(".yaml"):
            load_experiment(config, overrides)
            checked += 1
    assert checked >= 4


def exists(where: str, words: list[str]) -> None:
    """The help of the command that `words` name has their options."""
    help_text = io.StringIO()
    command = list(itertools.takewhile(lambda word: re.fullmatch("[a-z]+", word), words))[:2]
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        build_parser().parse_args([*command, "--help"])
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert " ".join(["rllib-llm", *command]) in help_text.getvalue(), f"{where}: {words}"
    assert [option for option in options if option not in help_text.getvalue()] == [], f"{where}: {words}"


def test_make_targets_of_the_pages_exist() -> None:
    """Each `make` target in a shell block is one of the Makefile's."""
    targets = set()
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if line.startswith(".PHONY:"):
            targets |= set(line.split()[1:])
    named = {
        line.split()[1]
        for block in blocks("bash", "sh")
        for line in block.text.splitlines()
        if line.startswith("make ") and len(line.split()) > 1
    }
    assert len(named) > 3
    assert named - targets == set()
