"""Answers that the pages print are those of the shipped model."""

from __future__ import annotations

import re

import pytest

from rllib_llm.engines import make_engine
from rllib_llm.engines.base import SamplingParams
from rllib_llm.models import load_tokenizer
from rllib_llm.models.paths import resolve_model_path
from tests.docs.blocks import ROOT

PREDICTION = re.compile(r'predict\(\["([^"]+)"\][^\n]*# ends with "([^"]+)"')
PRINTED = [
    (page.name, *found)
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for found in PREDICTION.findall(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "prompt", "end"), PRINTED)
def test_a_printed_answer_is_the_models(page: str, prompt: str, end: str) -> None:
    """A prompt of a page, of a kind that the model was made for, gets the printed answer, which is the right one."""
    terms = re.findall(r"([+-]?)(\d)", prompt)
    assert 5 <= len(terms) <= 7, f"{page}: the task has five to seven terms"
    assert end == f"#{sum(int(sign + digit) for sign, digit in terms)}"
    folder = str(resolve_model_path("tiny-chain"))
    tokenizer = load_tokenizer(folder)
    with make_engine("torch", folder, "unified-fp8") as engine:
        [[answer]] = engine.generate(
            [tokenizer(prompt)["input_ids"]], SamplingParams(temperature=0, max_tokens=64)
        )
    assert tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True).endswith(end)


def test_some_answers_are_printed() -> None:
    """The pattern above still finds what the pages print."""
    assert PRINTED
