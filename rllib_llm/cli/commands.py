"""The commands of `rllib-llm` and their help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rllib_llm.cli import table
from rllib_llm.cli.parsing import UsageError, new_parser, positive
from rllib_llm.cli.shell import command_line


def add_all(subparsers: Any, whole: argparse.ArgumentParser) -> None:
    """Add every command to the main parser, `whole`."""
    from precision_policies.cli import add_policy_parser
    from rllib_llm.cli.compare import add_compare_parsers
    from rllib_llm.cli.completion import add_completion_parser
    from rllib_llm.cli.doctor import add_doctor_parser
    from rllib_llm.cli.mismatch import add_mismatch_parser
    from rllib_llm.cli.models import add_models_parser
    from rllib_llm.cli.warm import add_warm_parser
    from rllib_llm.cli.watch import add_watch_parser

    _add_train(subparsers)
    add_warm_parser(subparsers)
    add_watch_parser(subparsers)
    _add_eval(subparsers)
    add_compare_parsers(subparsers)
    add_policy_parser(subparsers, _model_path, _config_path)
    _add_config(subparsers)
    _add_envs(subparsers)
    add_mismatch_parser(subparsers)
    add_models_parser(subparsers)
    _add_tracking(subparsers)
    add_doctor_parser(subparsers)
    add_completion_parser(subparsers, whole)


def _model_path(model: str) -> Path:
    from rllib_llm.models.paths import resolve_model_path

    # a config.json may stand alone
    return Path(model) if Path(model).is_file() else resolve_model_path(model)


def _config_path(name: str) -> str:
    """The file of a shipped config; any other name as it is."""
    from rllib_llm.experiment.file import shipped_experiments

    return str(shipped_experiments().get(name, name))


# ---- train -----------------------------------------------------------------------------------------------------------


def _add_train(subparsers: Any) -> None:
    parser = new_parser(
        subparsers,
        "train",
        "train a model as a config file says, with overrides",
        "  rllib-llm train quickstart\n"
        "  rllib-llm train configs/quickstart.yaml precision=mixed-bf16-fp8 train.lr=2e-4\n"
        "  rllib-llm train my.yaml run.iterations=500 run.resources.num_learners=2 tracking.enabled=false\n"
        "  rllib-llm train my.yaml 'env.config:={task: chain_sum}'      replaces the file's env.config; = would merge\n"
        "  rllib-llm train --resume results/quickstart-unified-fp8-20260101-120000\n\n"
        "Another env.name drops the file's env.config. "
        "Ctrl-C finishes the iteration, writes a checkpoint and says how to resume; so do SIGTERM and SIGHUP.\n"
        "All keys, with types and defaults: rllib-llm config keys",
    )
    parser.add_argument(
        "config", nargs="?", help="YAML file, or the name of a shipped config (rllib-llm config list)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides, e.g. train.lr=2e-4 precision=bf16"
    )
    parser.add_argument(
        "--resume", metavar="DIR", help="go on from the newest checkpoint of an experiment directory"
    )
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from rllib_llm.experiment.file import load_experiment
    from rllib_llm.experiment.resume import find_resumable

    if arguments.resume is None:
        if arguments.config is None or "=" in arguments.config:
            raise UsageError(
                "train needs a config: rllib-llm train quickstart [key=value …], or --resume DIR."
            )
        experiment, directory, checkpoint = load_experiment(arguments.config, arguments.overrides), None, None
    else:
        overrides = [*([arguments.config] if arguments.config else []), *arguments.overrides]
        if files := [text for text in overrides if "=" not in text]:
            raise UsageError(
                f"--resume takes the config from the experiment directory; drop {' '.join(files)}."
            )
        experiment, directory, checkpoint = find_resumable(arguments.resume, overrides)
        _refuse_finished(directory, checkpoint, experiment.run.iterations)

    from rllib_llm.cli.launch import launch

    return launch(experiment, directory, checkpoint).exit_status


def _refuse_finished(directory: Path, checkpoint: Path, iterations: int) -> None:
    """The checkpoint counts, not the curve: a run that was killed in its last iteration has one more of that."""
    from rllib_llm.on_disk.checkpoint import read_metadata

    if read_metadata(str(checkpoint))["training_iteration"] >= iterations:
        raise UsageError(
            f"{directory} has run all of its {iterations} iterations. Train longer with, for example, "
            f"{command_line('rllib-llm', 'train', '--resume', directory, f'run.iterations={2 * iterations}')}"
        )


# ---- eval ------------------------------------------------------------------------------------------------------------


def _add_eval(subparsers: Any) -> None:
    parser = new_parser(
        subparsers,
        "eval",
        "evaluate a checkpoint on held-out prompts, under the policy it was trained with",
        "  rllib-llm eval results/quickstart-unified-fp8-20260101-120000\n"
        "  rllib-llm eval results/…/checkpoint_000005 --prompts 256",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or an experiment directory (its newest checkpoint)")
    parser.add_argument(
        "--prompts", type=positive, metavar="N", help="held-out prompts (default: as the config says)"
    )
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from rllib_llm.cli.evaluate import evaluate_checkpoint

    print(evaluate_checkpoint(Path(arguments.checkpoint), arguments.prompts))
    return 0


# ---- config ----------------------------------------------------------------------------------------------------------


def _add_config(subparsers: Any) -> None:
    parser = new_parser(
        subparsers,
        "config",
        "show configs and their keys",
        "  rllib-llm config list\n"
        "  rllib-llm config show quickstart precision=bf16\n"
        "  rllib-llm config keys rollout",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="names and files of the shipped configs")
    listing.set_defaults(run=_config_list)
    show = actions.add_parser("show", help="the resolved config as YAML, checked")
    show.add_argument("config", help="YAML file, or the name of a shipped config")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.set_defaults(run=_config_show)
    keys = actions.add_parser("keys", help="every key with its default, allowed values and meaning")
    keys.add_argument("prefix", nargs="?", default="", help="only keys that begin with this")
    keys.set_defaults(run=_config_keys)


def _config_list(arguments: argparse.Namespace) -> int:
    from rllib_llm.experiment.file import shipped_experiments

    print(
        table.columns(("NAME", "FILE"), [(name, str(path)) for name, path in shipped_experiments().items()])
    )
    return 0


def _config_show(arguments: argparse.Namespace) -> int:
    from rllib_llm.experiment.file import load_experiment

    experiment = load_experiment(arguments.config, arguments.overrides)
    experiment.to_grpo_config()
    print(experiment.to_yaml(), end="")
    return 0


def _config_keys(arguments: argparse.Namespace) -> int:
    from rllib_llm.experiment.file import known_keys

    rows = [row for row in known_keys() if row[0].startswith(arguments.prefix)]
    if not rows:
        raise UsageError(f"no key begins with {arguments.prefix!r}; see rllib-llm config keys")
    print(table.columns(("KEY", "DEFAULT", "VALUES", "MEANING"), rows))
    return 0


# ---- envs ------------------------------------------------------------------------------------------------------------


def _add_envs(subparsers: Any) -> None:
    parser = new_parser(
        subparsers, "envs", "list the text environments that can be trained on", "  rllib-llm envs list"
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="names, and what each is")
    listing.set_defaults(run=_envs_list)


def _envs_list(arguments: argparse.Namespace) -> int:
    from rllib_llm.envs import registered_envs

    rows = [
        (name, _first_line(cls), f"{cls.__module__}:{cls.__qualname__}")
        for name, cls in registered_envs().items()
    ]
    print(table.columns(("NAME", "WHAT", "CLASS"), rows))
    print('\nYour own: env.name="package.module:ClassName", a class with reset(index) and step(completion).')
    return 0


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


# ---- tracking --------------------------------------------------------------------------------------------------------


def _add_tracking(subparsers: Any) -> None:
    parser = new_parser(
        subparsers,
        "tracking",
        "deliver what a run could not write to its MLflow store",
        "  rllib-llm tracking send results/…/tracking_unsent.jsonl",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    send = actions.add_parser("send", help="send a file of unsent writes")
    send.add_argument("file", help="tracking_unsent.jsonl of an experiment directory")
    send.add_argument("--uri", help="another store than the one that the file names")
    send.set_defaults(run=_tracking_send)


def _tracking_send(arguments: argparse.Namespace) -> int:
    from rllib_llm.tracking import send_spooled

    try:
        report = send_spooled(Path(arguments.file), arguments.uri)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(report)
    return 0 if report.complete else 1
