"""Imports go one way, as docs/architecture.md says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(file):
    """Absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


@pytest.mark.parametrize(
    ("room", "closed"),
    [
        ("precision_policies", ("precision_kernels", "rllib_llm", "torch", "ray", "vllm", "transformers")),
        ("kernels", ("rllib_llm", "ray", "transformers")),
        ("rllib_llm", ("rllib_llm.cli",)),
    ],
)
def test_nothing_imports_what_stands_above_it(room, closed):
    """Policies need no torch, kernels no Ray, and the command line is used by nobody."""
    files = [f for f in (ROOT / room).rglob("*.py") if ROOT / "rllib_llm" / "cli" not in f.parents]
    assert len(files) > 5
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imported(file)
        if any(name == other or name.startswith(f"{other}.") for other in closed)
    ]
    assert found == []
