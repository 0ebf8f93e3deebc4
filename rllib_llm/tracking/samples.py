"""What an iteration says in words: a few prompts, completions and rewards, and the attestations of both sides.

`GRPO` puts these into its result (`report`); the MLflow callback, in Tune's process, takes them out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

# Key of a result: tuple of {"prompt": …, "completion": …, "reward": …}. Tune's TensorBoard logger would try to make a
# histogram of a list, and print it all in a warning.
SAMPLES = "samples"
ATTESTATIONS = "attestations"  # key of a process's first result: {side: {key: value}}
SAMPLES_SHOWN = 8
MAX_CHARACTERS = 4000


def samples_table(result: Mapping[str, Any], step: int) -> dict[str, list[Any]]:
    """Columns ``iteration``, ``prompt``, ``completion``, ``reward`` … of the samples in a result; empty without any."""
    rows: Sequence[Mapping[str, Any]] = result.get(SAMPLES) or ()
    if not rows:
        return {}
    columns: dict[str, list[Any]] = {"iteration": [step] * len(rows)}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = [row.get(name) for row in rows]
    return columns
