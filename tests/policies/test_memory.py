"""What a learner holds per parameter, and the document that shows it."""

from __future__ import annotations

import pytest

from precision_policies import load_policy
from precision_policies.memory import state_bytes
from tests.policies import memory_table
from tests.policies.models import QWEN3_8B


def test_the_document_shows_what_the_code_computes() -> None:
    """docs/memory.md has the table as it is made now."""
    text = memory_table.DOCUMENT.read_text(encoding="utf-8")
    assert memory_table.with_table(text) == text


def test_the_parameters_of_the_table_are_those_of_qwen3_8b() -> None:
    """Its plan has so many parameters in projections and elsewhere."""
    sizes = {"linear": 0, "other": 0}
    for row in load_policy("unified-fp8").resolve(QWEN3_8B).modules:
        count = row.shape[0] * (row.shape[1] if len(row.shape) == 2 else 1)
        sizes["linear" if row.kind == "linear" else "other"] += count
    assert sizes == {"linear": memory_table.PROJECTIONS, "other": memory_table.OTHERS}


@pytest.mark.parametrize(
    ("policy", "changes", "operands", "arriving"),
    [
        ("bf16", {}, 2.0, 0.0),
        ("bf16", {"master_dtype": "bfloat16"}, 0.0, 2.0),
        ("bf16", {"master_dtype": "split_float32"}, 0.0, 0.0),
        ("fp16", {}, 2.0, 0.0),
        ("fp16", {"master_dtype": "bfloat16"}, 2.0, 2.0),
        ("unified-fp8", {}, 2.0 + 4 / 128**2, 0.0),
    ],
)
def test_copies_of_masters_are_counted(
    policy: str, changes: dict[str, str], operands: float, arriving: float
) -> None:
    """A copy is held where masters are not what the GEMMs read; BF16 gradients wait beside their sum."""
    found = state_bytes(load_policy({"extends": policy, **changes}))
    assert (found.operands, found.arriving) == (operands, arriving)
    assert found.total == found.master + found.moments + found.gradient + found.arriving + found.operands


def test_state_of_fp32_quality_halves_what_fp32_takes() -> None:
    """Split masters and 8-bit moments: 10.2 bytes with the gradient, where FP32 has 16."""
    narrow = {
        "extends": "unified-fp8",
        "master_dtype": "split_float32",
        "optimizer_state_dtype": "blockwise_8bit",
    }
    small, large = (state_bytes(load_policy(p)) for p in (narrow, "unified-fp8"))
    assert small.master + small.moments + small.gradient == 4.125 + 2.0625 + 4.0
    assert large.master + large.moments + large.gradient == 16.0
