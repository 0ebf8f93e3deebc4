"""The on-policy benchmark itself, at a size for a CPU: it is run by hand on a GPU and must not rot in between."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_policy.py"


def test_the_benchmark_trains_samples_and_finds_no_difference(tmp_path: Path) -> None:
    """Three rounds and one after two optimiser steps: every row has tokens, and a difference of exactly 0."""
    out = tmp_path / "rows.json"
    arguments = (
        "--shape tiny --rounds group uneven joining --train-steps 2 --scale-down 32 --kv-gib 1 --context 512"
    )
    turns = ["--turns", str(tmp_path / "turns"), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split(), "--device", "cpu", *turns],
        cwd=tmp_path, capture_output=True, text=True, timeout=1200, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    done_rounds = [(r["round"], r["optimiser_steps"]) for r in rows]
    assert done_rounds == [("group", 0), ("uneven", 0), ("joining", 0), ("group", 2)]
    assert all(r["tokens"] > 0 and r["rollout_tokens_per_s"] > 0 for r in rows)
    assert all(r["max_abs"] == 0 and r["bit_equal_share"] == 1 for r in rows)
    assert (
        rows[0]["mean_logprob"] != rows[3]["mean_logprob"]
    )  # the steps changed the weights, and the engine has them
