"""Triton's interpreter, which the other tests use on a CPU, runs kernels that its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("hopper_launches.py")


def test_every_kernel_compiles_for_hopper() -> None:
    """Every kernel compiles for Hopper on a machine without a GPU, with the dtypes and flags it is launched with."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
