"""`rllib-llm`: parse the command line, run the command, turn errors into an exit status.

Heavy imports (torch, ray, transformers) happen inside the commands, so that `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from precision_policies.errors import InputError
from rllib_llm.cli import commands
from rllib_llm.cli.signals import sigterm_as_ctrl_c

DESCRIPTION = """\
Reinforcement learning of language models as an RLlib plugin, under one precision policy on both sides.

  rllib-llm train quickstart                        a shipped config; the tiny model learns in minutes
  rllib-llm train my.yaml precision=bf16 train.lr=2e-4
  rllib-llm policy --help                           what a precision policy says about a model
"""

EPILOG = """\
exit status: 0 success · 1 the run failed · 2 bad input, nothing was run ·
             3 mismatch found (mismatch localise, models verify) · 130 interrupted
Each command has its own help: rllib-llm train --help
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments that returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rllib-llm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    commands.add_all(subparsers, parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        build_parser().print_help()
        return 0
    try:
        with sigterm_as_ctrl_c():
            return _run(argv)
    except KeyboardInterrupt:
        print("rllib-llm: interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    arguments = _parsed(build_parser(), argv)
    # RLlib announces its own "new API stack" at every validation of a config; it is the only one there is here.
    logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments) or 0)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 1
    except (
        InputError
    ) as error:  # what else is raised is a bug, or of a part that ran, and keeps its traceback
        print(f"rllib-llm: {error}", file=sys.stderr)
        return 2


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """argparse takes positional arguments from one place only; overrides may also stand after options."""
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "overrides"):
        _refuse_settings_as_options(parser, argv, rest)
    if not hasattr(arguments, "overrides") or any(text.startswith("-") or "=" not in text for text in rest):
        return parser.parse_args(argv)  # its own error where anything is left
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _refuse_settings_as_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], rest: Sequence[str]
) -> None:
    """``--precision bf16`` ends with status 2 and the form that is understood, ``precision=bf16``."""
    from rllib_llm.settings.names import SHORTHANDS, all_keys

    for text in rest:
        option, equals, value = text.partition("=")
        name = option.removeprefix("--")
        known = [key for key in (name, name.replace("-", "_")) if key in SHORTHANDS or key in all_keys()]
        if not option.startswith("--") or not known:
            continue
        if not equals:
            following = list(argv)[list(argv).index(text) + 1 :][:1]
            value = following[0] if following and not following[0].startswith("-") else "VALUE"
        parser.error(f"{option} is a setting, not an option: write {known[0]}={value}")


def _version() -> str:
    from importlib import metadata

    return f"rllib-llm {metadata.version('rllib-llm')}"
