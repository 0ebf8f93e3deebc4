"""Joins what several processes made of one study, each with seeds of its own."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any


def _rows(part: Path) -> list[dict[str, str]]:
    """Complete rows of a part; the last one is cut short if the process was killed while it wrote."""
    with (part / "curves.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def common_iterations(rows: list[dict[str, str]]) -> int:
    """The last iteration that every arm and seed has."""
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["arm"], row["seed"]
        last[key] = max(last.get(key, 0), int(row["iteration"]))
    return min(last.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="+", help="directories that `study` wrote")
    parser.add_argument("--out", required=True)
    parser.add_argument("--title")
    parser.add_argument("--notes", nargs="*", default=[], help="paragraphs for the report")


def _facts(parts: list[Path]) -> list[dict[str, Any]]:
    """compare.json of every part; ValueError if they are not parts of one study."""
    facts: list[dict[str, Any]] = [json.loads((part / "compare.json").read_text()) for part in parts]
    problems = [
        f"{part}: other {key} than {parts[0]}"
        for part, fact in zip(parts, facts, strict=True)
        for key in ("arms", "config", "environment", "baseline")
        if fact[key] != facts[0][key]
    ]
    seeds = [seed for fact in facts for seed in fact["planned"]["seeds"]]
    if len(set(seeds)) < len(seeds):
        problems.append(f"seeds appear twice: {sorted(seeds)}")
    if problems:
        raise ValueError("these are not parts of one study: " + "; ".join(problems))
    return facts


def merge(args: argparse.Namespace) -> None:
    """curves.csv up to the last iteration that all have, and one compare.json.

    ValueError if the parts differ in their arms, settings or environment, or have a seed in common. Cells that the
    guard halted would end the common part: `study` lists them in ``runs``, and they are not counted.
    """
    parts = [Path(part) for part in args.parts]
    facts = _facts(parts)
    seeds = [seed for fact in facts for seed in fact["planned"]["seeds"]]
    runs: list[dict[str, Any]] = [run for fact in facts for run in fact["runs"]]
    halted = {(run["arm"], str(run["seed"])) for run in runs if run["status"] == "halted"}
    rows = [row for part in parts for row in _rows(part)]
    last = common_iterations([r for r in rows if (r["arm"], r["seed"]) not in halted] or rows)
    kept = [row for row in rows if int(row["iteration"]) <= last]
    for run in runs:
        if run["status"] == "running":
            run["status"] = "finished"  # all that the study could do in its time
    made = facts[0] | {"runs": runs, "planned": facts[0]["planned"] | {"seeds": seeds, "iterations": last}}
    made["title"] = args.title or made["title"]
    made["notes"] = [
        *args.notes,
        f"Each seed ran in a process of its own until the time was over; shown are the {last} iterations that all "
        f"have ({len(rows) - len(kept)} later rows left out).",
    ]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(kept)
    (out / "compare.json").write_text(json.dumps(made, indent=1))
