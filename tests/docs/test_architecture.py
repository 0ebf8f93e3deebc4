"""docs/architecture.md and the import-linter contracts of pyproject.toml say the same."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
}


def section(title: str) -> list[list[str]]:
    """Rows of the first table below a heading, without its head."""
    text = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def below(layer: int) -> str:
    """What the column "may import" says of a layer."""
    return {1: "–", 2: "layer 1"}.get(layer, f"layers 1 to {layer - 1}")


def test_packages_stand_in_the_layers_of_the_contract() -> None:
    """The table has the contract's packages, layer by layer from the top, and each may import what is below."""
    layers = CONTRACTS["rllib_llm"]["layers"]
    expected = [
        (str(number), package.strip(), below(number))
        for number, line in zip(range(len(layers), 0, -1), layers, strict=True)
        for package in line.split("|")
    ]
    rows = section("Packages of rllib_llm")
    assert sorted((row[0], row[1].strip("`"), row[3]) for row in rows) == sorted(expected)
    assert [int(row[0]) for row in rows] == sorted((int(row[0]) for row in rows), reverse=True)


def test_packages_outside_of_the_layers_are_named() -> None:
    """What the contract leaves out stands in one sentence below the table."""
    sentence = re.search(r"^`assets`.*$", TEXT, flags=re.M)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence[0])) == set(CONTRACTS["rllib_llm"]["exhaustive_ignores"])


def test_top_level_packages_import_downwards() -> None:
    """The column "may import" of the first table is the contract of the three packages."""
    order = CONTRACTS["top"]["layers"]
    documented = {
        row[1].strip("`"): set(re.findall(r"`(\w+)`", row[3])) for row in section("Top-level packages")
    }
    assert documented == {name: set(order[place + 1 :]) for place, name in enumerate(order)}


def test_policies_and_kernels_import_no_heavy_library_even_by_a_string() -> None:
    """No file of the two lower packages imports torch or Ray (policies) or Ray (kernels) by `importlib`, which
    import-linter does not see."""
    closed = {
        "precision_policies": ("torch", "ray", "vllm", "transformers"),
        "kernels": ("ray", "transformers"),
    }
    found = []
    for folder, names in closed.items():
        files = sorted((ROOT / folder).rglob("*.py"))
        assert len(files) > 5
        for file in files:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func).endswith("import_module")
                    and node.args
                ):
                    name = getattr(node.args[0], "value", "")
                    if isinstance(name, str) and name.partition(".")[0] in names:
                        found.append(f"{file.relative_to(ROOT)}: {name}")
    assert found == []
