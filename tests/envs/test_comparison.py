from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_llm.envs.comparison import kind_of
from rllib_llm.envs.math_checker import MathChecker

DATA = Path(__file__).parent / "data"
GROUPS = [json.loads(line) for line in (DATA / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(seconds=20.0)
    yield checker
    checker.close()


def test_the_set_of_answers_is_large_enough_and_says_nothing_twice():
    """At least 500 (gold, answer, verdict) rows, most of them wrong answers that share something with their gold."""
    rows = [(g["gold"], a) for g in GROUPS for a in g["right"] + g["wrong"]]
    assert len(rows) >= 500
    assert len(set(rows)) == len(rows)
    assert sum(len(g["wrong"]) for g in GROUPS) > len(rows) / 2


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: ascii(group["gold"]))
def test_right_answers_are_paid_and_wrong_ones_are_not(checker, group):
    """Each right notation equals its gold; no answer that shares numbers, letters or units with it does."""
    gold = group["gold"]
    paid = [answer for answer in group["right"] + group["wrong"] if checker.equal(gold, answer)]
    assert paid == group["right"]


def test_no_answer_of_one_problem_is_paid_for_another(checker):
    """Golds of the set against each other: only those that are one value in other words are equal."""
    golds = [g["gold"] for g in GROUPS]
    equal = {
        (a, b)
        for i, a in enumerate(golds)
        for b in golds[i + 1 :]
        if kind_of(a) == kind_of(b) != "math" and checker.equal(a, b)
    }
    assert equal == {("5", "5 m"), ("5", "5 km"), ("28%", "0.28")}


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("72", "number"),
        ("-1,234.5", "number"),
        ("5 m", "number"),
        ("28%", "number"),
        ("\\frac{1}{2}", "number"),
        ("1.5e3", "number"),
        ("90^\\circ", "number"),
        ("$18", "number"),
        ("2\\pi", "math"),
        ("1, 2", "math"),
        ("(1, 2)", "math"),
        ("x = 5", "math"),
        ("7:32", "text"),
        ("a+b", "math"),
        ("no", "text"),
        ("BCA", "text"),
        ("July 4, 1776", "text"),
        ("12:00", "text"),
        ("3 hours 20 minutes", "text"),
        ("H2O", "text"),
        ("2024-05-06", "text"),
        ("10 Downing Street", "text"),
    ],
)
def test_gold_decides_how_it_is_compared(gold, kind):
    """auto: a number with its unit, a formula, or words."""
    assert kind_of(gold) == kind
    for other in ("math", "number", "text"):
        assert kind_of(gold, other) == other


@pytest.mark.parametrize(
    ("gold", "answer", "compare", "equal"),
    [
        ("1,500", "1500", "text", True),
        ("1/2", "0.5", "text", True),
        ("1/2", "one half", "text", False),
        ("ab", "ba", "math", True),
        ("ab", "ba", "auto", False),
        ("5", "2+3", "number", False),
        ("5", "2+3", "math", True),
        ("5", "5.0", "number", True),
        ("nan", "nan", "text", True),
        ("x", "5", "number", False),
    ],
)
def test_compare_can_be_chosen(checker, gold, answer, compare, equal):
    """The row or the configuration overrides what gold looks like."""
    assert checker.equal(gold, answer, compare) is equal


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " ",
        "$",
        "\\boxed{}",
        "{",
        "}" * 50,
        "\\frac{1}{",
        "((((",
        "∑" * 300,
        "\ud800",
        "\0",
        "1" * 5000,
        "1e9999999",
        "^" * 100,
        "\\sqrt" * 100,
        "nan",
        "NaN",
        "Infinity",
        "-inf",
        ", , ,",
        "()",
        "[]",
        "\\{\\}",
        "1,," * 200,
    ],
)
@pytest.mark.parametrize("gold", ["5", "1, 2", "x^2", "no", "(1, 2)"])
def test_no_answer_breaks_the_comparison(checker, gold, answer):
    """Whatever a model writes is a wrong answer, not an error."""
    assert checker.equal(gold, answer) is False
