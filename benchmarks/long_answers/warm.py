"""Compiles what the study runs on a GPU, in several processes: DeepGEMM takes 4 s of one core for each kernel."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_answers import task

WEIGHTS = ((768, 128), (256, 128), (128, 256), (512, 128))
"""(outputs, inputs) of the projections, joined and alone, and of lm_head."""
ROWS = (256, 384, 3072, 63500, 127000)
"""Decoding, prefill of the prompts, of the held-out ones, one optimiser step, all samples of an iteration."""


def gemms() -> list[Callable[[], object]]:
    """One call per kernel: formats x weight shapes x numbers of rows."""
    import precision_kernels as pk

    def rows(m: int, k: int) -> torch.Tensor:
        return torch.ones(m, k, dtype=torch.bfloat16, device="cuda")

    calls: list[Callable[[], object]] = []
    for n, k in WEIGHTS:
        for m in ROWS:
            calls.append(lambda m=m, n=n, k=k: pk.invariant_matmul(rows(m, k), rows(n, k)))
            calls.append(
                lambda m=m, n=n, k=k: pk.block_fp8_matmul(
                    pk.quantise_activation(rows(m, k)), pk.quantise_weight(rows(n, k))
                )
            )
        for out in (torch.bfloat16, torch.float32):
            calls.append(
                lambda n=n, k=k, out=out: pk.dgrad_fp8_matmul(
                    pk.quantise_activation(rows(ROWS[-1], n)), pk.quantise_weight(rows(n, k)), out
                )
            )
        calls.append(
            lambda n=n, k=k: pk.wgrad_fp8_matmul(
                pk.quantise_columns(rows(ROWS[-1], n)), pk.quantise_columns(rows(ROWS[-1], k))
            )
        )
    n, k = WEIGHTS[1]
    for m in ROWS:
        calls.append(lambda m=m: pk.invariant_matmul(rows(m, k), rows(n, k), torch.float32))
    return calls


def passes(arm: str, settings: dict[str, Any]) -> None:
    """An iteration of one arm on random weights: all other kernels, and what `gemms` forgot."""
    from benchmarks.long_answers.cell import Cell, Settings
    from benchmarks.long_answers.sampler import generate
    from rllib_llm.models import build_model, save_pretrained

    model = build_model(task.model_config(), "bf16", "train")
    model.initialise(0)
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, directory)
        chosen = Settings(**settings)
        cell = Cell(arm, 0, directory, chosen, torch.device("cuda"))
    problems = task.draw(np.random.default_rng(0), chosen.prompts, chosen.steps)
    [sample] = generate([cell.sampler], [problems.prompts()], chosen.group, chosen.limit, [[0, 0, 2]])
    cell.learn(problems, sample)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--share", help="i/n: compile this share (used by the processes themselves)")
    parser.add_argument("--settings", default="{}")


def warm(args: argparse.Namespace) -> None:
    """Start the processes, or be one of them."""
    if args.share:
        index, count = map(int, args.share.split("/"))
        arms = ("unified-fp8", "mixed-bf16-fp8", "bf16")
        began = time.time()
        if index < len(arms):
            passes(arms[index], json.loads(args.settings))
        else:
            for call in gemms()[index - len(arms) :: count - len(arms)]:
                call()
        torch.cuda.synchronize()
        print(json.dumps({"share": args.share, "seconds": round(time.time() - began, 1)}), flush=True)
        return
    shares = [f"{i}/{args.processes}" for i in range(args.processes)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.long_answers",
        "warm",
        "--settings",
        args.settings,
        "--share",
    ]
    running = [subprocess.Popen([*command, share], cwd=Path(__file__).parents[2]) for share in shares]
    failed = [share for share, process in zip(shares, running, strict=True) if process.wait()]
    if failed:
        raise RuntimeError(f"warming up failed in {', '.join(failed)}: see above")
