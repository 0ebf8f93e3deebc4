"""docs/policies.md says what the code does."""

from __future__ import annotations

import re

import pytest

from precision_policies import from_yaml
from tests.policies.doc_tables import DOCUMENT, with_tables

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    """Keys, shipped policies and environment variables; else run python -m tests.policies.doc_tables."""
    assert TEXT.count("<!-- table ") == 3
    assert with_tables(TEXT) == TEXT


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.S))
def test_every_yaml_example_loads(block: str) -> None:
    """A YAML block of the page is a policy."""
    assert from_yaml(block).fingerprint


def test_pictures_and_commands_of_the_page_exist() -> None:
    """Linked images are there, and every `rllib-llm policy` command on the page is a real one."""
    images = re.findall(r"\]\((images/[^)]+)\)", TEXT)
    assert images
    for image in images:
        assert (DOCUMENT.parent / image).is_file(), image
    commands = set(re.findall(r"rllib-llm policy (\w+)", TEXT))
    assert commands == {"list", "show", "diff", "check", "plan", "graph", "schema"}
