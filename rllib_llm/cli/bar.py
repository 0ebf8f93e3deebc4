"""A bar on the terminal, as every command that takes long draws it."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

__all__ = ["SECONDS_BETWEEN_LINES", "new_bar"]

SECONDS_BETWEEN_LINES = 10.0
"""Of the lines that stand for the bar where stderr is no terminal."""


def new_bar(**options: Any) -> tqdm:
    """A tqdm bar on stderr, which is a terminal. options: of tqdm."""
    size = os.get_terminal_size(sys.stderr.fileno())
    # a pseudo-terminal may have no size, and tqdm then draws nothing
    known = size.columns > 0 and size.lines > 0
    columns, lines = (None, None) if known else (120, 20)
    return tqdm(dynamic_ncols=known, ncols=columns, nrows=lines, file=sys.stderr, **options)
