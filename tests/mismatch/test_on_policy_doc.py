"""docs/on_policy.md names a guard for every source of mismatch: the guards must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "on_policy.md").read_text(encoding="utf-8")
SOURCES = (
    "RMSNorm", "q/k norm", "quantiser", "GEMM", "lm_head", "rotary", "split-KV", "chunked prefill", "prefix cache",
    "cascade", "KV dtype", "log-softmax", "temperature", "CUDA graphs", "torch.compile", "preemption",
)  # fmt: skip


def rows() -> list[list[str]]:
    table = TEXT.split("## Sources of mismatch")[1].split("## Exact on CPU")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][1:]


def test_every_named_test_exists() -> None:
    """Each test that the page names is a function of that file."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 20
    functions = {
        file: {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
        for file, _ in named
    }
    assert [f"{file}::{name}" for file, name in named if name not in functions[file]] == []


def test_every_known_source_has_a_row_and_a_guard() -> None:
    """Each source that is known has a row; a row without a test says so."""
    table = rows()
    assert [s for s in SOURCES if not any(s in row[0] for row in table)] == []
    assert all(len(row) == 4 for row in table)
    assert [row[0] for row in table if "::" not in row[3] and row[3] != "no test of ours"] == []
