"""docs/registry.md says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from rllib_llm.cli.main import build_parser
from rllib_llm.registry.signature import PARAMETERS

DOC = (Path(__file__).resolve().parents[2] / "docs" / "registry.md").read_text(encoding="utf-8")


def test_the_table_lists_what_is_registered(store):
    """Its first column are the entries of a registered model's directory, no more and no fewer."""
    listed = set(re.findall(r"^\| `([^`]+)` \| ", DOC.partition("## What is verified")[0], flags=re.M))
    found = {path.name + "/" * path.is_dir() for path in store.root().iterdir()}
    assert listed == found


def test_parameters_and_defaults_are_those_of_pyfunc():
    """Every parameter stands with its default."""
    sentence = DOC.partition("Parameters: ")[2].partition("Before the first answer")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(PARAMETERS)
    for name in ("max_tokens", "temperature", "top_p", "top_k"):
        assert f"`{name}` {PARAMETERS[name][1]}" in sentence


def test_the_commands_are_those_of_the_command_line():
    """Each `rllib-llm models` line of the page parses."""
    lines = re.findall(r"^rllib-llm (models .*?)(?:  +#.*)?$", DOC, flags=re.M)
    assert len(lines) == 4
    for line in lines:
        build_parser().parse_args(line.split())


def test_the_models_page_is_one_table(store):
    """Every row of the card has two cells: a bar inside a value would make a third, which MLflow does not show."""
    card = (store.root() / "README.md").read_text(encoding="utf-8")
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert len(rows) > 8
    assert {row.count("|") for row in rows} == {3}
