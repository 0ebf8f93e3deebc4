"""What the commands' parsers share."""

from __future__ import annotations

import argparse
from typing import Any

from rllib_llm.errors import InputError, RllibLLMError

__all__ = ["UsageError", "new_parser", "positive"]


class UsageError(RllibLLMError, InputError, ValueError):
    """Arguments that parse but make no sense together."""


def new_parser(subparsers: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """A command's parser, whose help starts with the summary and ends with examples."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
