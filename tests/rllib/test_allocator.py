"""Freed memory stays in the process: tensors made again touch no fresh pages."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
import numpy as np
from rllib_llm.process.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def work():
    a = np.full(2 << 20, 1.0)
    b = np.full(2 << 20, 2.0)
    return float((a + b)[0])

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    work()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def faults(mode: str, environment: dict[str, str]) -> tuple[bool | None, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, env=environment
    )
    kept, count = json.loads(done.stdout)
    return kept, count


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    import os

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    return dict(os.environ)


def test_kept_memory_has_no_page_faults(environment: dict[str, str]) -> None:
    """Arrays of 16 MiB, made and freed again and again, fault a hundred times less often than without."""
    kept, few = faults("keep", environment)
    if not kept:
        pytest.skip("the allocator of this system is not glibc's")
    _, many = faults("leave", environment)
    assert few * 100 < many


def test_a_users_own_setting_of_malloc_stays(environment: dict[str, str]) -> None:
    """Who has tuned glibc in the environment keeps what was chosen."""
    kept, _ = faults("keep", environment | {"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert kept is False
