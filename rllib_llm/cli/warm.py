"""`rllib-llm warm`: compile the kernels of a run before it starts, and the same step inside `train`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rllib_llm.cli.bar import SECONDS_BETWEEN_LINES, new_bar
from rllib_llm.cli.parsing import new_parser, positive
from rllib_llm.errors import RllibLLMError

if TYPE_CHECKING:
    from tqdm import tqdm

    from rllib_llm.algorithm.config import GRPOConfig
    from rllib_llm.warming.ahead import Progress

__all__ = ["CompileBar", "add_warm_parser", "warm_for_training"]


def add_warm_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = new_parser(
        subparsers,
        "warm",
        "compile the GPU kernels of a run, so that it need not wait for one",
        "  rllib-llm warm my.yaml\n"
        "  rllib-llm warm my.yaml train.micro_batch_tokens=16384 --processes 8\n\n"
        "The same config and overrides as for train. DeepGEMM's kernels go to DG_JIT_CACHE_DIR, Triton's to\n"
        "TRITON_CACHE_DIR; a second time there is nothing to compile.",
    )
    parser.add_argument("config", help="YAML file, or the name of a shipped config (rllib-llm config list)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for train")
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="that compile (default: one per core, at most 16)"
    )
    parser.set_defaults(run=_warm)


def _warm(arguments: argparse.Namespace) -> int:
    from rllib_llm.experiment.file import load_experiment
    from rllib_llm.warming.ahead import compile_ahead, describe

    settings = load_experiment(arguments.config, arguments.overrides).pinned().to_grpo_config().settings()
    try:
        with compile_bar() as bar:
            done = compile_ahead(settings, bar.show, processes=arguments.processes)
    except RllibLLMError as error:
        if isinstance(error, ValueError):  # of a model that cannot be read: bad input
            raise
        print(f"rllib-llm warm: {error}", file=sys.stderr)
        return 1
    print(describe(done))
    return 0


def warm_for_training(config: GRPOConfig) -> None:
    """Compile the matrix products of a trial on a GPU of this machine; says so in a line if that fails, and returns.

    The run then compiles kernels as it meets them. Nothing is done where neither learner nor engine is on a GPU, or
    where this machine has none.
    """
    from rllib_llm.warming.ahead import compile_ahead, describe, gpu_of_this_machine

    settings = config.settings()
    on_gpu = config.num_gpus_per_learner > 0 or config.num_gpus_per_env_runner > 0
    deepgemm = settings.policy.uses_fp8 or settings.policy.compute_dtype == "bfloat16"
    if not (on_gpu and deepgemm and gpu_of_this_machine()):
        return
    try:
        with compile_bar() as bar:
            done = compile_ahead(settings, bar.show, products_only=True)
    except Exception as error:  # whatever it is: the run does not depend on it
        reason = " ".join(str(error).split())
        _say(f"  kernels   not compiled ahead, the first iterations may wait for some: {reason}")
        return
    if done.parts:
        _say(f"  kernels   {describe(done)}")


@contextmanager
def compile_bar() -> Iterator[CompileBar]:
    """A bar that is closed at the end, whatever happens."""
    bar = CompileBar()
    try:
        yield bar
    finally:
        bar.close()


class CompileBar:
    """A tqdm bar over the sizes that were met, with the number of new kernels; lines where stderr is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._what = ""
        self._last_line = 0.0

    def show(self, progress: Progress) -> None:
        """Draw it anew."""
        if sys.stderr.isatty():
            self._draw(progress)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or progress.done == progress.total:
            self._last_line = time.monotonic()
            _say(progress_text(progress))

    def close(self) -> None:
        """Leave it as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, progress: Progress) -> None:
        if self._bar is None or progress.what != self._what:
            self.close()
            self._what = progress.what
            self._bar = new_bar(desc=f"compiling {progress.what}", total=progress.total, unit="size")
        self._bar.set_postfix_str(_new_kernels(progress), refresh=False)
        self._bar.update(progress.done - self._bar.n)


def progress_text(progress: Progress) -> str:
    """``compiling matrix products: 812 of 1040 sizes met, 37 new kernels``."""
    return (
        f"compiling {progress.what}: {progress.done} of {progress.total} sizes met, {_new_kernels(progress)}"
    )


def _new_kernels(progress: Progress) -> str:
    return f"{progress.kernels} new kernel{'' if progress.kernels == 1 else 's'}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
