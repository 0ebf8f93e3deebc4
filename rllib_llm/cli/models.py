"""`rllib-llm models …`: register a checkpoint in MLflow's model registry, list, verify and export what is there."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rllib_llm.cli import table
from rllib_llm.cli.parsing import UsageError, new_parser
from rllib_llm.cli.shell import command_line

DIFFERS = 3  # exit status: a registered model is not what it says it is


def add_models_parser(subparsers: Any) -> None:
    """Mount `models` and its actions."""
    parser = new_parser(
        subparsers,
        "models",
        "keep trained models in the MLflow model registry",
        "  rllib-llm models register results/quickstart-unified-fp8-20260101-120000 --name adder --alias best\n"
        "  rllib-llm models register 9b6567bf42b84ed09df8dc8efd0134d2 --name adder\n"
        "  rllib-llm models list\n"
        "  rllib-llm models verify adder@best\n"
        "  rllib-llm models export adder@best served/adder --format fp8\n\n"
        "In an experiment: model=models:/adder@best. In Python: mlflow.pyfunc.load_model('models:/adder@best').",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    _add_register(actions)
    listing = actions.add_parser("list", help="registered models, or the versions of one")
    listing.add_argument("name", nargs="?", help="only this model")
    listing.set_defaults(run=_list)
    verify = actions.add_parser(
        "verify",
        help="hash everything again, and quantise the masters again; exit status 3 if anything differs",
    )
    verify.set_defaults(run=_verify)
    export = actions.add_parser("export", help="write a directory that stock vLLM or transformers reads")
    for action in (verify, export):
        action.add_argument("model", metavar="MODEL", help="NAME@ALIAS or NAME/VERSION")
    export.add_argument("directory", metavar="DIR", help="a directory that does not exist yet")
    export.add_argument(
        "--format",
        choices=("hf", "fp8", "adapter"),
        help="hf: the masters; fp8: the bytes of the rollout (default: fp8 where the model has it); adapter: the PEFT "
        "directory of a run that trained adapters, which hf and fp8 are merged with",
    )
    export.set_defaults(run=_export)
    for name, action in actions.choices.items():
        own = "the one that the directory's runs were tracked in, else " if name == "register" else ""
        action.add_argument(
            "--tracking-uri",
            metavar="URI",
            help=f"MLflow store (default: {own}MLFLOW_TRACKING_URI, else sqlite:///mlflow.db)",
        )


def _add_register(actions: Any) -> None:
    register = actions.add_parser("register", help="make a checkpoint a version of a registered model")
    register.add_argument(
        "source",
        metavar="RUN|CHECKPOINT",
        help="MLflow run id, a checkpoint, or a trial's or experiment's directory (its furthest trained checkpoint)",
    )
    register.add_argument("--name", required=True, help="name of the registered model")
    register.add_argument("--alias", help="name of this version, for example best; moves here if it exists")
    register.add_argument(
        "--base-model",
        metavar="DIR",
        help="config and tokenizer, where the model that training started from is gone",
    )
    register.add_argument(
        "--example", metavar="TEXT", help="prompt of the input example (default: one of the run's)"
    )
    register.set_defaults(run=_register)


def _register(arguments: argparse.Namespace) -> int:
    from rllib_llm.on_disk.checkpoint import CheckpointError
    from rllib_llm.registry.register import register
    from rllib_llm.tracking.store import require_mlflow

    require_mlflow()
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it announces each step of saving a model
    try:
        made = register(
            arguments.source,
            arguments.name,
            alias=arguments.alias,
            tracking_uri=arguments.tracking_uri,
            base_model=arguments.base_model,
            example=arguments.example,
        )
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    manifest, reference = made.manifest, _reference(made.entry)
    print(
        table.pairs(
            [
                ("model", f"models:/{reference} (version {made.entry.version})"),
                ("policy", f"{manifest.policy_name} (fingerprint {manifest.policy_fingerprint[:16]})"),
                ("formats", "hf" if manifest.fp8 is None else "hf and fp8 (block-FP8, the rollout's bytes)"),
                *_merge_rows(made),
                ("checkpoint", f"{made.checkpoint.path}, iteration {made.checkpoint.training_iteration}"),
                ("MLflow run", made.source.run_id or "not known"),
                ("store", made.store),
            ]
        )
    )
    for obstacle in made.obstacles:
        print(f"note: stock vLLM on fp8/: {obstacle}")
    print(f"check it: {_verify_command(reference, arguments)}")
    return 0


def _merge_rows(made: Any) -> list[tuple[str, str]]:
    """What a merge of adapters lost, where there was one."""
    if made.merge is None:
        return []
    lost = f"{made.merge.lost_in_compute_dtype:.1%} of the merged update's elements vanish in hf/"
    if made.merge.lost_in_fp8 is not None:
        lost += f", {made.merge.lost_in_fp8:.1%} in fp8/"
    return [
        ("adapter", "adapter/ (PEFT); hf and fp8 are merged, which is not the function that was trained"),
        ("lost", lost),
        ("base", f"{made.checkpoint.base}, hash {str(made.checkpoint.base_hash)[:16]}"),
    ]


def _list(arguments: argparse.Namespace) -> int:
    from rllib_llm.registry.mlflow_registry import MANIFEST_TAG, Registry

    registry = Registry(arguments.tracking_uri)
    entries = registry.entries(arguments.name)
    if arguments.name and not entries:
        registry.find(f"{arguments.name}/1")  # says which models there are
    rows = [
        (
            entry.name,
            entry.version,
            ", ".join(entry.aliases) or "-",
            entry.tags.get("policy.name", "-"),
            entry.tags.get("policy.fingerprint", "-")[:12],
            entry.tags.get("training_iteration", "-"),
            entry.tags.get("base_model", "-"),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_ms / 1000)),
        )
        for entry in entries
        if MANIFEST_TAG in entry.tags
    ]
    header = (
        "NAME",
        "VERSION",
        "ALIASES",
        "POLICY",
        "FINGERPRINT",
        "ITERATION",
        "TRAINED FROM",
        "REGISTERED",
    )
    print(table.columns(header, rows))
    if foreign := len(entries) - len(rows):
        print(f"{foreign} version(s) of other kinds of models are not shown")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from rllib_llm.registry.mlflow_registry import Registry
    from rllib_llm.registry.verify import verify_package

    registry = Registry(arguments.tracking_uri)
    entry = registry.find(arguments.model)
    verdict = verify_package(registry.fetch(entry), entry.tags)
    for note in verdict.notes:
        print(f"note: {note}")
    if verdict.violations:
        count = f"{len(verdict.violations)} violation{'s' if len(verdict.violations) != 1 else ''}"
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(verdict.violations, 1))
        print(f"rllib-llm: {entry.uri}: {count}\n{lines}", file=sys.stderr)
        return DIFFERS
    manifest = verdict.manifest
    assert manifest is not None  # without one there is a violation
    against = "their hashes" if manifest.fp8 is None else "their hashes and, bit for bit, with fp8/"
    print(f"{entry.uri} is what was registered:")
    print(f"  files    {verdict.files}, {verdict.nbytes / 1e6:.1f} MB, sha256 of each")
    print(
        f"  tensors  {verdict.rederived} of the rollout made again from the masters, compared with {against}"
    )
    print(f"  policy   {manifest.policy_name}, fingerprint {manifest.policy_fingerprint[:16]}")
    print(f"  plan     {manifest.plan_hash[:16]}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from rllib_llm.on_disk.owner import owner_of
    from rllib_llm.registry.mlflow_registry import Registry
    from rllib_llm.registry.package import serving_environment
    from rllib_llm.registry.verify import verify_package

    registry = Registry(arguments.tracking_uri)
    entry = registry.find(arguments.model)
    root, target = registry.fetch(entry), Path(arguments.directory)
    verdict = verify_package(root, entry.tags)
    if verdict.violations or verdict.manifest is None:
        raise UsageError(
            f"{entry.uri} is not what was registered, nothing was written: "
            f"{_verify_command(arguments.model, arguments)}"
        )
    manifest = verdict.manifest
    form = arguments.format or ("hf" if manifest.fp8 is None else "fp8")
    folder = {"fp8": manifest.fp8, "adapter": manifest.adapter, "hf": manifest.masters}[form]
    if folder is None and form == "adapter":
        raise UsageError("--format adapter: this model was not trained with adapters; use --format hf")
    if folder is None:
        raise UsageError(
            f"--format fp8: the rollout of policy '{manifest.policy_name}' holds no FP8; use --format hf"
        )
    if target.exists():
        raise UsageError(f"{target} exists already: name a directory that does not")
    _copy_whole(root / folder, target)
    if form == "adapter":
        print(f"wrote {target} (PEFT adapter) from {entry.uri}, on base {manifest.lineage.get('base_model')}")
        return 0
    owner = owner_of(target)
    assert owner is not None  # verified above
    print(f"wrote {target} ({form}) from {entry.uri}")
    variables = serving_environment(owner.policy) if form == "fp8" else {}
    dtype = owner.policy.compute_dtype
    print("serve it with stock vLLM, without this package:")
    serve = command_line("vllm", "serve", target, "--dtype", dtype)
    print("  " + " ".join([*(f"{key}={value}" for key, value in variables.items()), serve]))
    return 0


def _copy_whole(source: Path, target: Path) -> None:
    """Under another name until all is there: an export that breaks off leaves no half model."""
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, part)
        part.rename(target)
    except (OSError, shutil.Error) as error:
        raise UsageError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _reference(entry: Any) -> str:
    return f"{entry.name}@{entry.aliases[0]}" if entry.aliases else f"{entry.name}/{entry.version}"


def _verify_command(model: str, arguments: argparse.Namespace) -> str:
    option = ["--tracking-uri", arguments.tracking_uri] if arguments.tracking_uri else []
    return command_line("rllib-llm", "models", "verify", model, *option)
