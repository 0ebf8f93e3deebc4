"""A whole GRPO step, sampling to pushed weights, of several arms in turns on one machine; phases timed apart.

    python benchmarks/e2e.py --shape 8b --out results/e2e        # bf16, mixed, unified-fp8 and the usual stack
    python benchmarks/e2e.py --shape 4b --arms bf16 unified-fp8 --answer 4096 --rounds 3
    python benchmarks/e2e.py --tiny --arms bf16 unified-fp8      # a CPU, one minute

An arm is a policy of this project, trained through RLlib with the engine on the learner's GPU, or `usual`: vLLM as it
comes in BF16, transformers in BF16, torch's fused AdamW. Weights and prompts are random and seeded; every answer has
its full length, so arms do equal work. A visit is one process: it builds, trains some iterations and ends, so that the
next arm has the GPU; rounds of visits follow one another (A B A B), so that drift of the machine meets all arms alike.

Rows are appended to `rows.jsonl` in the folder `--out` as iterations end. The report there, in JSON and Markdown, is
written anew after each visit; the first iteration of a visit, which compiles and captures, is reported as start and not
in the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
USUAL = "usual"
ARMS = ("bf16", "mixed-bf16-fp8", "unified-fp8", USUAL)
PHASES = ("sample", "advantages", "learn", "mismatch", "push_weights")
TINY = {
    "shape": "tiny", "prompts": 2, "group": 2, "prompt": 12, "answer": 6, "device": "cpu", "engine": "torch",
    "micro_batch_tokens": 64, "iterations": 2, "rounds": 1,
}  # fmt: skip


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; --tiny sets what makes it run on a CPU, whatever else was given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="policies (names or files), and usual")
    parser.add_argument("--shape", default="8b", help="0.6b, 1.7b, 4b, 8b, 14b or tiny")
    parser.add_argument("--out", type=Path, default=Path("e2e"))
    parser.add_argument("--models", type=Path, help="where models are written; kept, if given")
    for name, default, text in (
        ("rounds", 2, "visits of each arm"),
        ("iterations", 5, "of a visit, the first of them not in the medians"),
        ("prompts", 8, "of an iteration"),
        ("group", 8, "answers to a prompt"),
        ("prompt", 512, "tokens of a prompt"),
        ("answer", 2048, "tokens of an answer"),
        ("micro-batch-tokens", 8192, "most tokens of a forward pass"),
        ("kv-gib", 24, "the engine's key/value cache"),
        ("sequences", 256, "most sequences the engine decodes at once"),
        ("visit-limit", 900, "seconds after which a visit is ended"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--masters", default="split_float32", help="master_dtype of the policies")
    parser.add_argument("--moments", default="blockwise_8bit", help="optimizer_state_dtype of the policies")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(given)
    if args.tiny:
        vars(args).update(TINY)
    return args


def visit(args: argparse.Namespace, arm: str, turn: int, model: Path) -> str | None:
    """Run one arm in a process of its own; why it failed, or None. Its output goes to a log beside the rows."""
    script = "usual_arm.py" if arm == USUAL else "policy_arm.py"
    task = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    task |= {
        "arm": arm,
        "turn": turn,
        "model": str(model),
        "rows": str(args.out / "rows.jsonl"),
        "begun": time.time(),
    }
    log = args.out / f"{turn}-{Path(arm).stem}.log"
    command = [sys.executable, str(HERE / "end_to_end" / script), json.dumps(task)]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=args.visit_limit, env=_environment()
            )
        except subprocess.TimeoutExpired:
            return f"longer than {args.visit_limit} s, see {log}"
    return None if done.returncode == 0 else f"exit status {done.returncode}, see {log}"


def _environment() -> dict[str, str]:
    """Of a visit: nothing is fetched or reported, and memory that one phase gave back serves the next."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
    }
    return wanted | dict(os.environ)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows written so far; a last line that a killed visit left unfinished is no row."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def summary(rows: list[dict[str, Any]], arms: list[str]) -> list[dict[str, Any]]:
    """One entry per arm that has warm iterations: medians in seconds, rates, ratios to bf16 and to the usual stack."""
    found = []
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        warm = [row for row in own if row["iteration"] > 1]
        if not warm:
            continue
        learn = [row["phases"]["learn"] for row in warm]
        step = statistics.median(row["seconds"] for row in warm)
        found.append(
            {
                "arm": arm,
                "iterations": len(warm),
                "start_s": [row["since_start_s"] for row in own if row["iteration"] == 1],
                "step_s": step,
                "phases_s": {p: statistics.median(row["phases"].get(p, 0.0) for row in warm) for p in PHASES},
                "learn_slowest_over_median": max(learn) / statistics.median(learn),
                "answer_tokens_per_s": statistics.median(row["tokens"] / row["seconds"] for row in warm),
                "memory_gib": {k: max(row["memory"].get(k, 0.0) for row in own) for k in own[-1]["memory"]},
                "mismatch_max_abs": max((row["mismatch"].get("max_abs", 0.0) for row in own), default=0.0),
                "bit_equal_share": min(
                    (row["mismatch"].get("bit_equal_share", 1.0) for row in own), default=1.0
                ),
            }
        )
    base = {entry["arm"]: entry["step_s"] for entry in found}
    for entry in found:
        for other in ("bf16", USUAL):
            if other in base:
                entry[f"times_{other}"] = base[other] / entry["step_s"]
    return found


def markdown(args: argparse.Namespace, entries: list[dict[str, Any]], failures: list[str]) -> str:
    """The report as a page."""
    work = f"{args.prompts} x {args.group} answers of {args.answer} tokens after {args.prompt}"
    lines = [f"# One GRPO step of the {args.shape} shape: {work}", ""]
    heads = [
        "arm",
        "step s",
        *(f"{p} s" for p in PHASES),
        "tokens/s",
        "x bf16",
        "x usual",
        "slowest/median learn",
    ]
    heads += ["max abs", "bit-equal", "start s", "GiB"]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for e in entries:
        memory = ", ".join(
            f"{k.removesuffix('_peak_gib')} {v:.1f}" for k, v in sorted(e["memory_gib"].items())
        )
        ratios = (f"{e[k]:.2f}" if k in e else "" for k in ("times_bf16", f"times_{USUAL}"))
        cells = [e["arm"], f"{e['step_s']:.2f}", *(f"{e['phases_s'][p]:.2f}" for p in PHASES)]
        cells += [f"{e['answer_tokens_per_s']:.0f}", *ratios, f"{e['learn_slowest_over_median']:.2f}"]
        own = e["arm"] != USUAL
        cells += [f"{e['mismatch_max_abs']:.3g}" if own else "", f"{e['bit_equal_share']:.4f}" if own else ""]
        cells += [", ".join(f"{s:.0f}" for s in e["start_s"]), memory]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Medians of the iterations after the first of each visit; start: process to the first's end.",
    ]
    return "\n".join(lines + [f"- {failure}" for failure in failures]) + "\n"


def main(given: list[str] | None = None) -> int:
    """Run all visits; 1 if one failed."""
    args = arguments(given)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = (args.models or Path(folder)) / args.shape
        make = [sys.executable, str(HERE / "end_to_end" / "model.py"), args.shape, str(model), args.device]
        make.append(str(args.prompt + args.answer + 8))
        subprocess.run(make, check=True, env=_environment())
        for turn in range(1, args.rounds + 1):
            for arm in args.arms:
                failure = visit(args, arm, turn, model)
                failures += [] if failure is None else [f"{arm}, round {turn}: {failure}"]
                entries = summary(read_rows(rows), args.arms)
                settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
                report = {"settings": settings, "arms": entries, "failures": failures}
                (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
                (args.out / "report.md").write_text(markdown(args, entries, failures))
                print((args.out / "report.md").read_text(), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
