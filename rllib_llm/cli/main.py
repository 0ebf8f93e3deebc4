"""`rllib-llm`: parse the command line, run the command, turn errors into an exit status.

Heavy imports (torch, ray, transformers) happen inside the commands, so that `--help` and a wrong option answer at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rllib_llm.cli import commands

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
    commands.add_all(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parsed(build_parser(), argv)
    # RLlib announces its own "new API stack" at every validation of a config; it is the only one there is here.
    logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        print("rllib-llm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        sys.stderr.close()
        return 1
    except Exception as error:
        if isinstance(error, _input_errors()):
            print(f"rllib-llm: {error}", file=sys.stderr)
            return 2
        raise


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes positional arguments from one place only; overrides may also stand after options."""
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "overrides") or any(text.startswith("-") or "=" not in text for text in rest):
        return parser.parse_args(argv)  # its own error where anything is left
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _input_errors() -> tuple[type[Exception], ...]:
    """Errors that say what is wrong with the input; everything else is a bug and keeps its traceback."""
    from precision_policies import PolicyError
    from rllib_llm.algorithm.checkpoint import CheckpointError as TrainedCheckpointError
    from rllib_llm.algorithm.placement import PlacementError
    from rllib_llm.cli.cluster import RayUnavailableError
    from rllib_llm.compare.curves import CurvesError
    from rllib_llm.compare.figures import FiguresUnavailableError
    from rllib_llm.engines.base import EngineUnavailableError
    from rllib_llm.envs import EnvConfigError
    from rllib_llm.experiment import ExperimentError
    from rllib_llm.models.architecture import ArchitectureError
    from rllib_llm.models.paths import ModelPathError
    from rllib_llm.models.safetensor_files import CheckpointError
    from rllib_llm.registry.errors import RegistryError
    from rllib_llm.tracking.store import TrackingUnavailableError

    return (
        PolicyError,
        TrainedCheckpointError,
        PlacementError,
        RayUnavailableError,
        CurvesError,
        FiguresUnavailableError,
        ExperimentError,
        ArchitectureError,
        ModelPathError,
        CheckpointError,
        EnvConfigError,
        EngineUnavailableError,
        RegistryError,
        TrackingUnavailableError,
        commands.UsageError,
    )


def _version() -> str:
    from importlib import metadata

    return f"rllib-llm {metadata.version('rllib-llm')}"
