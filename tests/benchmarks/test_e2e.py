"""The end-to-end benchmark at a size for a CPU: it is run by hand on a GPU and must not rot in between."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "e2e.py"


@pytest.fixture(scope="module")
def e2e() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("e2e_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(arm: str, iteration: int, seconds: float, learn: float, **more: object) -> dict[str, object]:
    """A row as a visit writes it."""
    phases = {"sample": seconds - learn, "learn": learn}
    made = {"arm": arm, "iteration": iteration, "seconds": seconds, "phases": phases, "tokens": 100.0}
    return made | {"since_start_s": 50.0, "memory": {"learner_cuda_peak_gib": 90.0}, "mismatch": {}} | more


def test_medians_leave_the_first_iteration_of_a_visit_out(e2e: ModuleType) -> None:
    """Ratios are of medians of warm iterations; the slowest learning phase, memory and mismatch are the worst seen."""
    rows = [
        row("bf16", 1, 99.0, 9.0),
        *(row("bf16", i, s, 4.0) for i, s in ((2, 10.0), (3, 12.0), (4, 11.0))),
    ]
    differing = {"max_abs": 0.5, "bit_equal_share": 0.9}
    rows += [row("unified-fp8", 1, 80.0, 9.0, mismatch=differing), row("unified-fp8", 2, 5.0, 2.0)]
    rows += [row("unified-fp8", 3, 6.0, 4.0, memory={"learner_cuda_peak_gib": 95.0})]
    bf16, unified = e2e.summary(rows, ["bf16", "mixed-bf16-fp8", "unified-fp8"])
    assert (bf16["step_s"], bf16["start_s"], bf16["times_bf16"]) == (11.0, [50.0], 1.0)
    assert (unified["step_s"], unified["times_bf16"]) == (5.5, 2.0)
    assert unified["learn_slowest_over_median"] == pytest.approx(4 / 3)
    assert (unified["mismatch_max_abs"], unified["bit_equal_share"]) == (0.5, 0.9)
    assert unified["memory_gib"] == {"learner_cuda_peak_gib": 95.0}
    assert "times_usual" not in unified
    page = e2e.markdown(e2e.arguments(["--shape", "4b"]), [bf16, unified], ["usual, round 1: exit status 1"])
    assert "| unified-fp8 | 5.50 |" in page
    assert page.rstrip().endswith("usual, round 1: exit status 1")


def test_an_unfinished_line_is_no_row(e2e: ModuleType, tmp_path: Path) -> None:
    """Rows of a visit that was killed while it wrote are those with their end."""
    path = tmp_path / "rows.jsonl"
    assert e2e.read_rows(path) == []
    path.write_text('{"arm": "bf16"}\n{"arm": "uni')
    assert e2e.read_rows(path) == [{"arm": "bf16"}]


def test_a_tiny_run_reports_every_arm(tmp_path: Path) -> None:
    """Two arms on a CPU: warm rows with equal work, exact where the policy promises it, and both reports."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--arms",
        "mixed-bf16-fp8",
        "unified-fp8",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    logs = "\n".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["iteration"]) for r in rows] == [
        (arm, i) for arm in ("mixed-bf16-fp8", "unified-fp8") for i in (1, 2)
    ]
    assert {r["tokens"] for r in rows} == {24.0}
    assert {"sample", "learn", "push_weights"} <= rows[0]["phases"].keys()
    mixed, unified = json.loads((tmp_path / "report.json").read_text())["arms"]
    assert (unified["mismatch_max_abs"], unified["bit_equal_share"]) == (0.0, 1.0)
    assert mixed["mismatch_max_abs"] > 0
    assert "| unified-fp8 |" in (tmp_path / "report.md").read_text()
