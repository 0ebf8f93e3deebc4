"""`rllib-llm completion`: a script that teaches a shell the commands and their options."""

from __future__ import annotations

import argparse
from typing import Any

from rllib_llm.cli.parsing import UsageError, new_parser

__all__ = ["add_completion_parser"]

_SHELLS = ("bash", "zsh", "tcsh")


def add_completion_parser(subparsers: Any, whole: argparse.ArgumentParser) -> None:
    """Add the command. whole: the parser of all commands, which is what gets completed."""
    parser = new_parser(
        subparsers,
        "completion",
        "print a completion script for a shell",
        '  eval "$(rllib-llm completion bash)"\n  rllib-llm completion zsh > ~/.zsh/completions/_rllib-llm',
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")
    parser.set_defaults(run=lambda arguments: _completion(whole, arguments.shell))


def _completion(whole: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion needs shtab: pip install 'rllib-llm[completion]'") from error
    print(shtab.complete(whole, shell=shell))
    return 0
