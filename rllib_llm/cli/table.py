"""Two-column and multi-column tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """``name   value`` lines, names padded to one width, between two rules."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    rule = "─" * min(100, max(len(line) for line in lines))
    return "\n".join([rule, *lines, rule])


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header line; every column is as wide as its widest cell."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )
