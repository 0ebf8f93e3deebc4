"""Commands that we print for the user to run: quoted, so that paths with spaces can be pasted."""

from __future__ import annotations

import shlex

__all__ = ["command_line"]


def command_line(*words: object) -> str:
    """The words as one line for a POSIX shell."""
    return shlex.join(str(word) for word in words)
