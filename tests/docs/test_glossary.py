"""docs/glossary.md says where each noun lives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
# noun -> a public name that its file must define
DEFINES = {
    "policy": "PrecisionPolicy",
    "plan": "Plan",
    "contract": "compare_attestations",
    "attestation": "build_attestation",
    "operator": "bound_implementations",
    "engine": "RolloutEngine",
    "rollout, episode": "TextEpisode",
    "learner": "LLMTorchLearner",
    "weight update, push": "WeightSync",
    "mismatch": "metrics",
}


def test_each_noun_lives_where_the_page_says() -> None:
    """The first table has the ten nouns; each file is there and defines what the noun names."""
    table = TEXT.split("More words:")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| .* \| `([\w/.]+)` \|$", table, flags=re.M)
    assert {noun for noun, _ in rows} == set(DEFINES)
    for noun, file in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert DEFINES[noun] in names, f"{file} does not define {DEFINES[noun]}"
