"""The samples table: a few prompts, completions and rewards of an iteration, in MLflow's column layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAMPLES_KEY = "samples"  # key of a result that holds a list of {"prompt": …, "completion": …, "reward": …}


def samples_table(result: Mapping[str, Any], step: int) -> dict[str, list[Any]]:
    """Columns ``iteration``, ``prompt``, ``completion``, ``reward`` … of the samples in a result; empty without any."""
    rows: Sequence[Mapping[str, Any]] = result.get(SAMPLES_KEY) or ()
    if not rows:
        return {}
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, list[Any]] = {"iteration": [step] * len(rows)}
    for name in names:
        columns[name] = [row.get(name) for row in rows]
    return columns
