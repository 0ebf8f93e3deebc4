"""Compiling ahead: the kernels of a run that are not there yet, in processes side by side, with a stamp at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.errors import RllibLLMError
from rllib_llm.models.checkpoint import load_config
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.process.kernel_cache import CACHE_VARIABLE, compiled_kernels, kernel_cache
from rllib_llm.warming.compiling import COMPILE_SHARE, shares_of
from rllib_llm.warming.pool import run_tasks
from rllib_llm.warming.products import Product, limits_of, products_of
from rllib_llm.warming.stamp import Stamp, gpu_of_this_machine, versions

if TYPE_CHECKING:
    from rllib_llm.settings.groups import Settings

__all__ = [
    "MOST_PROCESSES",
    "Compiled",
    "KernelCompileError",
    "NoGpuError",
    "Progress",
    "compile_ahead",
    "describe",
]

MOST_PROCESSES = 16
"""Each is a CUDA context of half a gigabyte, and 8B's list has 21 shares."""
_LEARNER_PASS = "rllib_llm.warming.learner_pass:learner_pass"


class KernelCompileError(RllibLLMError, RuntimeError):
    """Kernels of a run cannot be compiled; the message has one line for each product."""


class NoGpuError(RllibLLMError, RuntimeError):
    """Kernels are to be compiled on a machine without a GPU."""


@dataclass(frozen=True)
class Progress:
    """How far compiling is. what: "matrix products" or "the learner's own". done, total: sizes or steps that were
    met. kernels: new ones of DeepGEMM."""

    what: str
    done: int
    total: int
    kernels: int


@dataclass(frozen=True)
class Compiled:
    """What `compile_ahead` did. parts: those that were not there yet. kernels: new ones of DeepGEMM."""

    parts: tuple[str, ...]
    kernels: int
    seconds: float
    processes: int
    cache: Path


def compile_ahead(
    settings: Settings,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    products_only: bool = False,
    processes: int | None = None,
) -> Compiled:
    """Compile the kernels that a run with these settings will meet, unless the stamps say that they are there.

    products_only: DeepGEMM's alone, without a pass of the learner for those of Triton. processes: at most so many
    compile; None: one per core, at most `MOST_PROCESSES`.

    Raises NoGpuError; KernelCompileError naming each product that failed; CompileProcessError for a process that
    ended; ModelPathError and ArchitectureError for a model that cannot be used.
    """
    gpu = gpu_of_this_machine()
    if gpu is None:
        raise NoGpuError(
            "there is no NVIDIA GPU here (nvidia-smi names none), so no kernel can be compiled: run this on a machine "
            "that trains or samples"
        )
    began, cache = time.monotonic(), kernel_cache()
    products, installed = products_of(settings), {"gpu": gpu, "versions": versions()}
    work = _Work(settings, products, cache, processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES))
    before, made = compiled_kernels(cache), []
    stamps: list[tuple[str, Stamp, Callable[..., None]]] = [
        ("products", Stamp(cache, "products", products, installed), work.products)
    ]
    if not products_only:
        learner = Stamp(cache, "learner", products, installed | {"pass": _pass_of(settings)})
        stamps.append(("learner", learner, work.learner))
    for part, stamp, run in stamps:
        if not stamp.valid:
            run(on_progress)
            stamp.write()
            made.append(part)
    kernels = compiled_kernels(cache) - before
    return Compiled(tuple(made), kernels, time.monotonic() - began, work.processes, cache)


@dataclass(frozen=True)
class _Work:
    settings: Settings
    listed: Sequence[Product]
    cache: Path
    processes: int

    def products(self, on_progress: Callable[[Progress], None]) -> None:
        shares = shares_of(self.listed)
        total = sum(len(share["rows"]) for share in shares)
        self._run("matrix products", COMPILE_SHARE, shares, total, on_progress)

    def learner(self, on_progress: Callable[[Progress], None]) -> None:
        from rllib_llm.warming.learner_pass import STEPS

        self._run("the learner's own", _LEARNER_PASS, [_pass_of(self.settings)], len(STEPS), on_progress)

    def _run(
        self,
        what: str,
        function: str,
        tasks: list[dict[str, Any]],
        total: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        before, done = compiled_kernels(self.cache), 0
        environment = self.settings.policy.environment(engine="torch", device="cuda")
        environment |= {CACHE_VARIABLE: str(self.cache), "OMP_NUM_THREADS": "1"}

        def step(_: str) -> None:
            nonlocal done
            done += 1
            on_progress(Progress(what, done, total, compiled_kernels(self.cache) - before))

        on_progress(Progress(what, 0, total, 0))
        failures = run_tasks(function, tasks, self.processes, step, environment)
        if failures:
            listed = "\n".join(f"  - {failure}" for failure in failures)
            raise KernelCompileError(f"{len(failures)} of {len(tasks)} shares of {what} failed:\n{listed}")


def _pass_of(settings: Settings) -> dict[str, Any]:
    """What `learner_pass` needs to know, as plain data."""
    llm, rollout, train = settings.model, settings.rollout, settings.train
    config = load_config(resolve_model_path(str(llm.path)))
    limits = limits_of(settings, config.max_position_embeddings)
    return {
        "model": str(llm.path),
        "policy": settings.policy.to_dict(),
        "adapter": None if llm.adapter is None else llm.adapter.spec().to_dict(),
        "gradient_checkpointing": llm.gradient_checkpointing,
        "tokens": train.micro_batch_tokens,
        "longest": min(limits.longest, train.micro_batch_tokens),
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "entropy": train.entropy_coeff != 0.0,
        "device": "cuda",
    }


def describe(compiled: Compiled) -> str:
    """One line about what was done."""
    if not compiled.parts:
        return f"nothing to compile: the kernels of this run lie in {compiled.cache}"
    return (
        f"compiled {compiled.kernels} kernels in {compiled.seconds:.0f} s with {compiled.processes} processes into "
        f"{compiled.cache}"
    )
