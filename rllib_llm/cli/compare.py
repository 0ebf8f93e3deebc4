"""`rllib-llm compare` and `rllib-llm report`: train policy × seed, and say in one page what came out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.cli.parsing import UsageError, new_parser, positive
from rllib_llm.cli.shell import command_line

if TYPE_CHECKING:
    from precision_policies import PrecisionPolicy
    from precision_policies.errors import Violation
    from rllib_llm.cli.compare_run import ComparisonOutcome
    from rllib_llm.compare.experiment import ComparisonPlan
    from rllib_llm.compare.report import Options, Report

_MOST_SEEDS = 1000  # as a number: a seed that was meant as one of a list is larger
_NEEDS = (
    "compare needs a config and policies: rllib-llm compare quickstart --policies bf16,unified-fp8 --seeds 5"
)


def add_compare_parsers(subparsers: Any) -> None:
    """Add `compare` and `report` to the main parser."""
    parser = new_parser(
        subparsers,
        "compare",
        "train one config under several precision policies and seeds, and write an HTML report",
        "  rllib-llm compare quickstart --policies bf16,mixed-bf16-fp8,unified-fp8 --seeds 5\n"
        "  rllib-llm compare my.yaml train.lr=2e-4 --policies bf16,./mine.yaml --seeds 0,1,7 --iterations 200\n"
        "  rllib-llm compare --resume results/quickstart-compare-20260101-120000\n\n"
        "Every cell (policy × seed) runs the same number of iterations: run.stop and run.max_minutes of the config do\n"
        "not apply. Ctrl-C writes checkpoints and says how to resume.",
    )
    parser.add_argument("config", nargs="?", help="YAML file, or the name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, for all cells alike")
    parser.add_argument("--policies", metavar="A,B,…", help="policies to compare: names or YAML files")
    parser.add_argument(
        "--seeds", default=None, metavar="N", help="number of seeds (default 5), or a list: 0,1,7"
    )
    parser.add_argument(
        "--iterations", type=positive, metavar="N", help="of every cell (default: run.iterations)"
    )
    parser.add_argument(
        "--concurrent", type=positive, metavar="N", help="most cells at a time (default: what fits)"
    )
    parser.add_argument("--out", metavar="DIR", help="directory to make (default: below run.directory)")
    parser.add_argument("--resume", metavar="DIR", help="go on with an interrupted comparison")
    _add_report_options(parser)
    parser.set_defaults(run=_compare)
    report = new_parser(
        subparsers,
        "report",
        "write the HTML report of raw results: curves*.jsonl or curves*.csv in a directory",
        "  rllib-llm report results/quickstart-compare-20260101-120000\n"
        "  rllib-llm report benchmarks/results/long_answers --baseline bf16 --target 0.8",
    )
    report.add_argument(
        "directory", help="directory with raw results (docs/experiments.md says in what format)"
    )
    _add_report_options(report)
    report.set_defaults(run=_report)


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--metric", help="what is compared, higher is better (default: mean reward of an iteration)"
    )
    group.add_argument("--baseline", metavar="ARM", help="arm to measure the others against (default: bf16)")
    group.add_argument(
        "--target", type=float, help="reward whose cost is reported (default: 90 %% of the baseline's gain)"
    )
    group.add_argument(
        "--margin", type=float, help="relative difference that counts as equal (default: 0.01)"
    )
    group.add_argument("--last", type=positive, metavar="N", help="values of a final reward (default: 5)")


def _options(arguments: argparse.Namespace) -> Options:
    from rllib_llm.compare.report import Options

    names = ("metric", "baseline", "target", "margin", "last")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return Options(**given)


def _report(arguments: argparse.Namespace) -> int:
    from rllib_llm.compare.report import write_report

    file, report = write_report(arguments.directory, _options(arguments))
    _print_summary(file, report)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from precision_policies.errors import Violation
    from rllib_llm.compare.figures import require_matplotlib
    from rllib_llm.experiment.errors import ExperimentError

    require_matplotlib()  # not after hours of training
    options = _options(arguments)
    if problems := options.problems():
        raise ExperimentError("report options", [Violation("", None, text) for text in problems])
    if arguments.resume is not None:
        if arguments.config or arguments.policies or arguments.seeds or arguments.iterations or arguments.out:
            raise UsageError(
                "--resume takes config, policies, seeds and iterations from the directory; drop the others."
            )
        directory = Path(arguments.resume).expanduser().absolute()
        plan = read_plan(directory, arguments.concurrent)
        _check_baseline(plan, options)
        return _run(plan, options, resumed=directory)
    if arguments.config is None or "=" in arguments.config or not arguments.policies:
        raise UsageError(_NEEDS)
    plan = _new_plan(arguments)
    _check_baseline(plan, options)
    return _run(plan, options, out=arguments.out)


def _check_baseline(plan: ComparisonPlan, options: Options) -> None:
    if options.baseline is not None and options.baseline not in plan.arms:
        raise UsageError(
            f"--baseline {options.baseline}: no policy of this comparison ({', '.join(plan.arms)})."
        )


def _new_plan(arguments: argparse.Namespace) -> ComparisonPlan:
    from rllib_llm.compare.experiment import ComparisonPlan
    from rllib_llm.experiment.file import load_experiment

    experiment = load_experiment(arguments.config, arguments.overrides)
    policies = _policies(arguments.policies)
    seeds = _seeds("5" if arguments.seeds is None else arguments.seeds, experiment.run.seed)
    return ComparisonPlan(
        experiment, policies, seeds, arguments.iterations or experiment.run.iterations, arguments.concurrent
    )


def _policies(text: str) -> tuple[PrecisionPolicy, ...]:
    """Policies by name or file. Raises PolicyError with what is wrong with any of them."""
    from precision_policies import PolicyError, load_policy

    policies: list[PrecisionPolicy] = []
    violations: list[Violation] = []
    for name in filter(None, map(str.strip, text.split(","))):
        try:
            policies.append(load_policy(name))
        except PolicyError as error:
            violations += error.violations
    if violations:
        raise PolicyError(f"--policies {text}", violations)
    return tuple(policies)


def _seeds(text: str, first: int) -> tuple[int, ...]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--seeds {text}: a number of seeds, or seeds with commas between them.") from None
    if "," in text:
        return tuple(numbers)
    if not numbers or not 1 <= numbers[0] <= _MOST_SEEDS:
        raise UsageError(f"--seeds {text}: at least 1 and at most {_MOST_SEEDS}, or a list of seeds.")
    return tuple(range(first, first + numbers[0]))


def _refuse_full(wished: str | None) -> None:
    path = Path(wished).expanduser() if wished is not None else None
    if path is not None and path.is_dir() and any(path.iterdir()):
        raise UsageError(f"--out {wished} is not empty; go on with it by --resume {wished}, or name another.")


def _new_directory(plan: ComparisonPlan, wished: str | None) -> Path:
    from rllib_llm.experiment.resume import new_directory

    if wished is None:
        return new_directory(plan.experiment, "compare")
    path = Path(wished).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {wished}: cannot be made ({error.strerror}).") from error
    return path


def read_plan(directory: Path, concurrent: int | None) -> ComparisonPlan:
    """The plan of a comparison that was begun in `directory`. Raises UsageError where none was."""
    from precision_policies import PolicyError, load_policy
    from rllib_llm.compare.curves import DESCRIPTION_FILE
    from rllib_llm.compare.experiment import ComparisonPlan
    from rllib_llm.experiment.file import load_experiment
    from rllib_llm.on_disk.directories import EXPERIMENT_FILE

    files = [directory / EXPERIMENT_FILE, directory / DESCRIPTION_FILE]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UsageError(
            f"{directory} has no {' and no '.join(missing)}; give a directory made by rllib-llm compare."
        )
    try:
        description = json.loads(files[1].read_text(encoding="utf-8"))
        planned, arms = description["planned"], description["arms"]
        policies = tuple(load_policy(arms[name]["definition"]) for name in planned["arms"])
        seeds, iterations = tuple(planned["seeds"]), int(planned["iterations"])
    except PolicyError:  # says itself what is wrong
        raise
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise UsageError(
            f"{files[1]} does not hold the plan of a comparison ({type(error).__name__}: {error}); its raw results can "
            f"still be reported: {command_line('rllib-llm', 'report', directory)}"
        ) from error
    experiment = load_experiment(files[0])
    return ComparisonPlan(experiment, policies, seeds, iterations, concurrent)


def _run(
    plan: ComparisonPlan, options: Options, *, resumed: Path | None = None, out: str | None = None
) -> int:
    """Train and report in the directory `resumed`, else in a new one, made when nothing can refuse any more."""
    from rllib_llm.cli.cluster import running_ray
    from rllib_llm.cli.compare_run import run_comparison
    from rllib_llm.experiment.rules import usable_configs
    from rllib_llm.on_disk.directories import only_here

    started = time.monotonic()
    config = usable_configs(plan.experiment, plan.configs)[0]
    _refuse_full(out)
    with ExitStack() as held:
        if resumed is not None:
            held.enter_context(only_here(resumed))
        watch = held.enter_context(running_ray(plan.experiment.run.resources, config))
        directory = resumed or _new_directory(plan, out)
        if resumed is None:
            held.enter_context(only_here(directory))
        outcome = run_comparison(
            plan, config, directory, options.baseline, resume=resumed is not None, watch=watch
        )
    _conclude(outcome, directory, options, minutes=(time.monotonic() - started) / 60)
    return outcome.exit_status


def _conclude(outcome: ComparisonOutcome, directory: Path, options: Options, minutes: float) -> None:
    """Write the report of what was trained, and say how it ended."""
    from rllib_llm.cli.launch import how_to_look
    from rllib_llm.compare.report import write_report

    if not any(directory.glob("curves*.jsonl")):
        print("No cell has finished an iteration: there is nothing to report.", file=sys.stderr)
    else:
        file, report = write_report(directory, dataclasses.replace(options))
        outcome.attach(file, report)
        _print_summary(file, report)
    if outcome.tracking is not None and outcome.tracking.tracking_uri.startswith("sqlite"):
        print(how_to_look(outcome.tracking.tracking_uri))
    print(f"{outcome.text} after {minutes:.1f} min; raw results in {directory}")
    for line in outcome.problems:
        print(line, file=sys.stderr)


def _print_summary(file: Path, report: Report) -> None:
    print("\n".join(f"· {sentence}" for sentence in report.summary))
    print(f"report: {file}")
