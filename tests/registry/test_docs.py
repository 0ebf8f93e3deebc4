"""docs/registry.md says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from rllib_llm import make_engine
from rllib_llm.cli.main import build_parser
from rllib_llm.engines.base import SamplingParams
from rllib_llm.models.checkpoint import load_tokenizer
from rllib_llm.models.paths import resolve_model_path
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


def test_the_example_prompt_is_answered_as_the_page_says():
    """The prompt of the page has as many terms as the model was trained for, and its greedy answer is the sum."""
    prompt, answer = re.search(r'predict\(\["([^"]+)"\].*# ends with "#(-?\d+)"', DOC).groups()
    terms = re.findall(r"([+-]?)(\d)", prompt)
    assert 5 <= len(terms) <= 7
    assert sum(-int(digit) if sign == "-" else int(digit) for sign, digit in terms) == int(answer)
    ids = load_tokenizer(resolve_model_path("tiny-chain"))(prompt)["input_ids"]
    with make_engine("torch", "tiny-chain", "unified-fp8") as engine:
        [[completion]] = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=64))
    text = load_tokenizer(resolve_model_path("tiny-chain")).decode(
        completion.token_ids, skip_special_tokens=True
    )
    assert text.endswith(f"#{answer}")


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
