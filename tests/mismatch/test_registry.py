"""docs/mismatch.md, the registry and the code say the same."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from rllib_llm.mismatch import METRICS, SIGN_CONVENTION, markdown_table, metrics
from rllib_llm.mismatch.registry import BUCKETED, FAMILIES, POSITION_BUCKETS, PROBABILITY_BUCKETS

DOC = (Path(__file__).parents[2] / "docs" / "mismatch.md").read_text(encoding="utf-8")


def between(marker: str) -> str:
    found = re.search(rf"<!-- {marker}:begin[^>]*-->\n(.*?)\n<!-- {marker}:end -->", DOC, re.DOTALL)
    assert found, f"docs/mismatch.md has no {marker} markers"
    return found.group(1).strip()


def test_the_documented_table_is_the_registry() -> None:
    """Names, formulas, values for equal sides and absences: the table is the registry's, line by line."""
    assert between("table") == markdown_table()


def test_the_documented_buckets_are_the_registry() -> None:
    """Every family with its bucket names."""
    assert between("families").splitlines() == [f"* `{name}`: {text}" for name, text in FAMILIES.items()]


def test_the_sign_convention_is_written_down() -> None:
    """The docs state the sign convention in the registry's words."""
    assert SIGN_CONVENTION in DOC


def test_the_code_computes_exactly_the_registered_names() -> None:
    """Nothing undocumented is reported, nothing documented is missing; buckets carry exactly the bucketed
    ones."""
    n = 40_000
    rollout = -torch.linspace(1e-3, 6, n)
    got = metrics(rollout - 0.01, rollout, torch.ones(n), torch.zeros(n).long())
    plain = {key for key in got if "/" not in key}
    assert plain == {m.name for m in METRICS}
    expected = {f"by_position/{b}/{m}" for b in POSITION_BUCKETS for m in BUCKETED}
    expected |= {f"by_probability/{b}/{m}" for b in PROBABILITY_BUCKETS for m in BUCKETED}
    assert set(got) - plain == expected


def test_documented_sign_of_k1() -> None:
    """Engine more confident than trainer (Delta < 0) gives k1 > 0, as "mean(-Delta)" says."""
    got = metrics(torch.tensor([-2.0]), torch.tensor([-1.0]), torch.ones(1))
    assert got["k1"] == 1.0
    assert got["train_higher_share"] == 0.0
