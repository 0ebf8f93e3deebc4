"""Semantics of exempt patterns, against an independent matcher."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_policies.exempt import compile_pattern, resolve_patterns
from tests.random_examples import examples

PART = st.text("ab_1", min_size=1, max_size=3)
NAME = st.lists(PART, min_size=1, max_size=5).map(".".join)
PATTERN = st.lists(st.text("ab_1*?", min_size=1, max_size=3) | st.just("**"), min_size=1, max_size=5).map(
    ".".join
)


def by_recursion(pattern: list[str], name: list[str]) -> bool:
    """The stated semantics, written as recursion over parts."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        at_end = len(pattern) == 1
        return any(by_recursion(pattern[1:], name[i:]) for i in range(1 if at_end else 0, len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and by_recursion(pattern[1:], name[1:])


@examples(500)
@given(PATTERN, NAME)
def test_patterns_mean_what_is_stated(pattern: str, name: str) -> None:
    """'*' and '?' stay inside a part, '**' is any number of parts (a trailing one at least one)."""
    got = compile_pattern(pattern).fullmatch(name) is not None
    assert got == by_recursion(pattern.split("."), name.split("."))


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("**.mlp.gate", "model.layers.0.mlp.gate", True),
        ("**.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1.**", "model.layers.11.mlp.up_proj", False),
        ("model.layers.1.**", "model.layers.1.mlp.up_proj", True),
        ("q_proj", "model.layers.1.self_attn.q_proj", False),
        ("**.?_proj", "model.layers.1.self_attn.q_proj", True),
        ("**.?_proj", "model.layers.1.mlp.up_proj", False),
        ("model.layers.*.mlp.*", "model.layers.3.mlp.up_proj", True),
        ("model.*", "model.layers.3", False),
        ("**", "lm_head", True),
        ("lm_head.**", "lm_head", False),
        ("(a|b).[0-9]", "a.1", False),
    ],
)
def test_examples(pattern: str, name: str, matches: bool) -> None:
    """Cases from the documentation; other frameworks' substring and regex readings differ in most of them."""
    assert (compile_pattern(pattern).fullmatch(name) is not None) is matches


def test_each_name_keeps_the_first_pattern_and_all_unmatched_are_listed() -> None:
    """Order decides the reason, not the set; every pattern without a match is a violation with its index."""
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"]
    matched, violations = resolve_patterns(["nothing", "**.up_proj", "**.mlp.**", "neither"], names)
    assert matched == {"model.layers.0.mlp.up_proj": "**.up_proj"}
    assert [v.key for v in violations] == ["exempt.modules[0]", "exempt.modules[3]"]
