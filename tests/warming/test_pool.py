"""Compiling in processes: every step is heard, a death has a name, and nothing outlives its parent's interest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rllib_llm.warming.pool import CompileProcessError, run_tasks

FUNCTION = "tests.warming.fakes:work"
HERE = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def run(tasks: list[dict[str, Any]], processes: int = 2) -> tuple[list[str], list[str]]:
    """(steps in the order in which they were heard, failures)"""
    steps: list[str] = []
    failures = run_tasks(FUNCTION, tasks, processes, steps.append, HERE)
    return steps, failures


def test_more_tasks_than_processes_are_all_done() -> None:
    """Each step of each task is heard once, and what a task prints is no message."""
    steps, failures = run([{"steps": [f"{task}{i}" for i in range(task)]} for task in range(5)])
    assert sorted(steps) == ["10", "20", "21", "30", "31", "32", "40", "41", "42", "43"]
    assert not failures


def test_a_task_that_fails_costs_no_other() -> None:
    """Its error and the step before it are told; the same process goes on with the next task."""
    steps, failures = run([{"steps": ["one"], "fails": "no such kernel"}, {"steps": ["two"]}], processes=1)
    assert steps == ["one", "two"]
    assert failures == ["ValueError: no such kernel (after one)"]


def test_a_process_that_dies_is_an_error_with_its_last_lines() -> None:
    """The signal, what it was doing and what it printed last; no wait for an answer that never comes."""
    with pytest.raises(
        CompileProcessError, match=r"ended by SIGKILL, after one; its last lines:\n(?s:.*)the last words"
    ):
        run([{"steps": ["one"], "dies": True}])


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C while one compiles ends it and what it had started."""
    pids = tmp_path / "pids"

    def interrupted(step: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(FUNCTION, [{"hangs": str(pids)}], 1, interrupted, HERE)
    worker, child = map(int, pids.read_text().split())
    assert gone(worker)
    while not gone(child):  # it has its SIGKILL, and nobody here is its parent
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
