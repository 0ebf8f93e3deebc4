"""docs/troubleshooting.md indexes every error of the three packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENDS = ("Error", "Warning", "Halt")


def error_classes() -> set[str]:
    """Public classes of the packages that are named like errors and derive from something."""
    found = set()
    for folder in ("precision_policies", "kernels", "rllib_llm"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith(ENDS) and node.bases:
                    found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def test_every_error_class_has_a_row() -> None:
    """Each error class stands in a table, each name in a table is an error class, and each row says what to do."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in TEXT.split("## By what you see")[0].splitlines()
        if line.startswith("| `")
    ]
    assert len(error_classes()) > 30
    assert {row[0].strip("`") for row in rows} == error_classes()
    assert all(len(row) == 3 and all(row) for row in rows)


def test_settings_on_the_page_exist() -> None:
    """Settings that the page tells the reader to change are keys of an experiment file."""
    from rllib_llm.experiment.file import load_experiment

    tree = load_experiment("quickstart").to_dict()
    named = re.findall(r"`((?:run|rollout|train|model|tracking|precision)\.[\w.]+)(?:=[^`]*)?`", TEXT)
    assert len(named) > 10
    missing = []
    for key in named:
        place = tree
        for part in key.split("."):
            place = (
                place.get(part, None) if isinstance(place, dict) and part in place else missing.append(key)
            )
    assert missing == []
