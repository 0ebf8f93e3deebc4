"""The table of docs/memory.md, made from the code: `python -m tests.policies.memory_table` writes it anew."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args

from precision_policies import load_policy, schema
from precision_policies.memory import state_bytes

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
PROJECTIONS, OTHERS = 6_945_767_424, 1_244_967_936
"""Parameters of Qwen3-8B: of the 36 layers' projections, and of embedding, lm_head and norms."""


def table() -> str:
    """Bytes per parameter, and GiB of Qwen3-8B, for every format of the optimiser's state under unified-fp8."""
    rows = [
        "| master_dtype | optimizer_state_dtype | master | moments | gradient | operands | sum | 8B, GiB |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    for master, moments in itertools.product(get_args(schema.MasterDtype), get_args(schema.MomentDtype)):
        state = {"master_dtype": master, "optimizer_state_dtype": moments}
        fp8, plain = (
            state_bytes(load_policy({"extends": name, **state})) for name in ("unified-fp8", "bf16")
        )
        gradient = f"{fp8.gradient:g}" + (f" + {fp8.arriving:g}" if fp8.arriving else "")
        total = (fp8.total * PROJECTIONS + plain.total * OTHERS) / 2**30
        cells = (
            f"`{master}`",
            f"`{moments}`",
            f"{fp8.master:g}",
            f"{fp8.moments:g}",
            gradient,
            f"{fp8.operands:.4g}",
        )
        rows.append(f"| {' | '.join(cells)} | {fp8.total:.4g} | {total:.1f} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """The document with its table filled."""
    made = f"<!-- table -->\n{table()}\n<!-- end -->"
    return re.sub(r"<!-- table -->.*?<!-- end -->", lambda _: made, text, flags=re.S)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
