"""All cells of the study in lockstep: same prompts and same random numbers for every arm of a seed."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_answers import task
from benchmarks.long_answers.cell import ARMS, Cell, Settings
from benchmarks.long_answers.sampler import generate

EVAL_SEED = 1_000_003
"""Held-out problems come from this stream, which no training seed reaches."""
COLUMNS = (
    "env_runners/episode_return_mean", "evaluation/env_runners/episode_return_mean",
    "env_runners/response_length_mean", "env_runners/truncated_share", "env_runners/num_tokens_sampled",
    "num_groups_without_signal", "mismatch/k3", "mismatch/mean_abs", "mismatch/max_abs", "mismatch/bit_equal_share",
    "mismatch/chi2_sequence",
    *(f"mismatch/by_position/{bucket}/{name}" for bucket in ("0-31", "32-127", "128-511", "512-2047")
      for name in ("k3", "mean_abs", "max_abs", "num_tokens")),
    "precision/guard_violations", "timers/sample", "timers/mismatch", "timers/learn", "timers/push_weights",
    "time_this_iter_s",
    *(f"learners/default_policy/{name}" for name in
      ("num_tokens", "policy_loss", "grad_norm", "entropy", "clip_fraction", "approx_kl", "num_skipped_steps",
       "correction_fraction_high", "correction_weight_min", "correction_raw_max")),
)  # fmt: skip


class Curves:
    """Rows in the schema of ``rllib-llm compare report``: one CSV file, six significant digits."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, new = path, not path.exists()
        if new:
            self._append(["arm", "seed", "iteration", *COLUMNS])

    def row(self, cell: Cell, values: dict[str, float]) -> None:
        shown = [f"{values[name]:.6g}" if name in values else "" for name in COLUMNS]
        self._append([cell.label, cell.seed, cell.iteration, *shown])

    def _append(self, fields: Sequence[Any]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(fields)


def evaluate(cells: Sequence[Cell], count: int) -> list[float]:
    """Mean reward of each cell on `count` held-out problems, one answer each at temperature 1, by its rollout model."""
    settings = cells[0].settings
    rows = settings.rows
    totals = np.zeros(len(cells))
    for part in range(count // rows):
        problems = task.draw(np.random.default_rng([EVAL_SEED, part]), rows, settings.steps)
        samples = generate(
            [c.sampler for c in cells], [problems.prompts()] * len(cells), 1, settings.limit,
            [[EVAL_SEED, part, 1]] * len(cells),
        )  # fmt: skip
        totals += [task.rewards(problems, s.completions).mean() for s in samples]
    return (totals / (count // rows)).tolist()


def iterate(cells: Sequence[Cell], curves: Curves, eval_count: int) -> None:
    """One iteration of all cells. Sampling time is that of all cells together, shared out equally."""
    settings = cells[0].settings
    began = time.perf_counter()
    problems = {
        c.seed: task.draw(np.random.default_rng([c.seed, c.iteration]), settings.prompts, settings.steps)
        for c in cells
    }
    samples = generate(
        [c.sampler for c in cells], [problems[c.seed].prompts() for c in cells], settings.group, settings.limit,
        [[c.seed, c.iteration, 2] for c in cells],
    )  # fmt: skip
    sampling = (time.perf_counter() - began) / len(cells)
    results = []
    for cell, sample in zip(cells, samples, strict=True):
        began = time.perf_counter()
        values = cell.learn(problems[cell.seed], sample)
        values |= {"timers/sample": sampling, "time_this_iter_s": sampling + time.perf_counter() - began}
        results.append(values)
    if eval_count:
        for values, score in zip(results, evaluate(cells, eval_count), strict=True):
            values["evaluation/env_runners/episode_return_mean"] = score
    for cell, values in zip(cells, results, strict=True):
        curves.row(cell, values)


def progress_line(cells: Sequence[Cell], curves: Curves, elapsed: float) -> str:
    """Reward and mean |Δ| per arm of the last iteration, for a log."""
    with curves.path.open() as file:
        last = [r for r in csv.DictReader(file) if int(r["iteration"]) == cells[0].iteration]
    shown = []
    for arm in dict.fromkeys(c.label for c in cells):
        rows = [r for r in last if r["arm"] == arm]
        means = {
            short: float(np.mean([float(r[name] or "nan") for r in rows]))
            for short, name in (("R", COLUMNS[0]), ("eval", COLUMNS[1]), ("k3", "mismatch/k3"),
                                ("max", "mismatch/max_abs"), ("ent", "learners/default_policy/entropy"),
                                ("gn", "learners/default_policy/grad_norm"), ("s", "time_this_iter_s"))
        }  # fmt: skip
        shown.append(arm + " " + " ".join(f"{k}={v:.3g}" for k, v in means.items()))
    return f"iteration {cells[0].iteration} {elapsed:.0f} s | " + " | ".join(shown)


def labels(arm: str, lrs: Sequence[float], lr: float) -> list[tuple[float, str]]:
    """(learning rate, label of the arm): one, or in a pilot several learning rates beside each other."""
    return [(value, f"{arm}@{value:g}") for value in lrs] if lrs else [(lr, arm)]


def study(args: argparse.Namespace) -> None:
    """Run until `iterations` or the time are used up; every cell has the same number of iterations at the end."""
    began = time.time()
    settings = Settings(**json.loads(args.settings))
    device, out = torch.device(args.device), Path(args.out)
    cells = [
        Cell(arm, seed, args.model, dataclasses.replace(settings, lr=lr), device, label)
        for seed in args.seeds
        for arm in args.arms
        for lr, label in labels(arm, args.lrs, settings.lr)
    ]
    state = Path(args.state) if args.state else None
    resumed = [cell.restore(state) for cell in cells] if state else []
    if any(resumed) and len({cell.iteration for cell in cells if cell.status == "running"}) > 1:
        raise ValueError(
            f"{state} holds cells of different iterations: give it the same arms and seeds as before"
        )
    curves = Curves(out / "curves.csv")
    print(f"{len(cells)} cells ready after {time.time() - began:.1f} s", flush=True)
    if not any(resumed):
        names = [f"{c.label}/{c.seed}" for c in cells]
        print(
            "held-out before training:",
            dict(zip(names, evaluate(cells, args.eval_count), strict=True)),
            flush=True,
        )
    active = [c for c in cells if c.status == "running"]  # the guard may end a cell, as its policy says
    deadline = min(began + args.seconds, args.until)
    while active and active[0].iteration < args.iterations and time.time() < deadline:
        due = args.eval_every and (active[0].iteration + 1) % args.eval_every == 0
        iterate(active, curves, args.eval_count if due else 0)
        print(progress_line(active, curves, time.time() - began), flush=True)
        if device.type == "cuda":
            print(f"GPU memory peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        describe(args, settings, cells, out)
        active = [c for c in active if c.status == "running"]
    if state:
        for cell in cells:
            cell.save(state)


def describe(args: argparse.Namespace, settings: Settings, cells: Sequence[Cell], out: Path) -> None:
    """compare.json: what was compared, where, and how far it came."""
    arms = {
        c.label: {
            "policy": c.policy.name,
            "fingerprint": c.policy.fingerprint,
            "plan_hash": c.model.plan.hash,
        }
        for c in cells
    }
    runs = [
        {"arm": c.label, "seed": c.seed, "reason": c.reason,
         "status": c.status if c.status == "halted" else "finished" if c.iteration >= args.iterations else "running"}
        for c in cells
    ]  # fmt: skip
    environment = {
        "version.torch": torch.__version__, "version.python": platform.python_version(),
        "hardware.gpu_names": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "git.rllib_llm.commit": _commit(),
    }  # fmt: skip
    pretraining = Path(args.model) / "pretraining.json"
    shared = {
        "settings": dataclasses.asdict(settings),
        "eval_count": args.eval_count,
        "eval_every": args.eval_every,
    }
    if pretraining.is_file():
        shared["pretraining"] = {
            k: v for k, v in json.loads(pretraining.read_text()).items() if k != "history"
        }
    facts = {
        "schema": "rllib-llm/curves/1", "title": args.title, "baseline": cells[0].label,
        "planned": {"arms": list(arms), "seeds": list(args.seeds), "iterations": args.iterations},
        "arms": arms, "runs": runs, "environment": environment, "config": json.dumps(shared, indent=1),
    }  # fmt: skip
    (out / "compare.json").write_text(json.dumps(facts, indent=1))


def _commit() -> str:
    if "RLLIB_LLM_COMMIT" in os.environ:
        return os.environ["RLLIB_LLM_COMMIT"]
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory that `pretrain` wrote")
    parser.add_argument("--out", required=True, help="directory for curves.csv and compare.json")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no iteration after this")
    parser.add_argument("--until", type=float, default=math.inf, help="nor after this Unix time")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--eval-count", type=int, default=128)
    parser.add_argument("--settings", default="{}", help="JSON of benchmarks.long_answers.cell.Settings")
    parser.add_argument("--state", help="directory with the cells' states, to go on in another call")
    parser.add_argument(
        "--lrs", nargs="+", type=float, default=[], help="a pilot: every arm with each of these"
    )
    parser.add_argument("--title", default="Long answers")
