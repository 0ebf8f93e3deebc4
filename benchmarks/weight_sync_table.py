"""Result files of weight_sync.py as a Markdown table: python benchmarks/weight_sync_table.py a.json b.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(files: list[Path]) -> str:
    """Markdown of result files."""
    lines = []
    for file in files:
        result = json.loads(file.read_text())
        if not lines:
            lines += [
                f"# Weight pushes, {result['shape']} on {result['machine']}, torch {result['torch']}",
                "",
                "Seconds from changed weights to the compared receipt, medians after a first push; extra GPU memory of "
                "learner + engine at the most.",
                "",
                "| weights | transport | GB | pushes | s | of it manifest | hashing once | first push | extra GB |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
        lines += [_table_row(row) for row in result["rows"]]
    return "\n".join(lines) + "\n"


def _table_row(row: dict[str, Any]) -> str:
    made, hashed = (f"{row[key]:.3f}" if key in row else "–" for key in ("manifest_s", "hash_s"))
    extra = "–"
    if "extra_learner_bytes" in row:
        extra = f"{row['extra_learner_bytes'] / 1e9:.2f} + {row['extra_engine_bytes'] / 1e9:.2f}"
    return (
        f"| {row['policy']} | {row['transport']} | {row['gigabytes']:.2f} | {row['pushes']} | {row['seconds']:.3f} | "
        f"{made} | {hashed} | {row['first_s']:.2f} | {extra} |"
    )


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]), end="")
