"""Make a training checkpoint a version of a registered model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.checkpoint import load_tokenizer
from rllib_llm.process.attest import build_attestation
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.fp8_format import serving_obstacles
from rllib_llm.registry.hashes import file_sha256
from rllib_llm.registry.manifest import MANIFEST_FILE, Manifest
from rllib_llm.registry.masters import TrainedCheckpoint, load_masters, read_checkpoint
from rllib_llm.registry.merged import Merged, MergeReport, load_merged
from rllib_llm.registry.mlflow_registry import MANIFEST_TAG, Entry, Registry
from rllib_llm.registry.package import CARD_FILE, Record, write_package
from rllib_llm.registry.reference import name_problems
from rllib_llm.registry.source import (
    Source,
    example_prompt,
    find_source,
    metrics_at,
    source_problems,
    tracking_uri_of,
)
from rllib_llm.registry.upload import Upload, upload
from rllib_llm.tracking import entries
from rllib_llm.tracking.provenance import git_tags

__all__ = ["Registered", "register"]

_PROMPT = "1 + 1 ="


@dataclass(frozen=True)
class Registered:
    """What `register` made: the entry, the store it is in, and what was put there."""

    entry: Entry
    store: str
    source: Source
    checkpoint: TrainedCheckpoint
    manifest: Manifest
    obstacles: tuple[str, ...]
    merge: MergeReport | None = None


def register(
    source: str,
    name: str,
    *,
    alias: str | None = None,
    tracking_uri: str | None = None,
    base_model: str | None = None,
    example: str | None = None,
) -> Registered:
    """Export a checkpoint, save it as an MLflow model, and add it to the registry.

    Args:
        source: MLflow run id, or path of a checkpoint, trial or experiment (`find_source`).
        name, alias: of the registered model; an alias that another version has moves to the new one.
        tracking_uri: MLflow store; None takes the one that a directory's runs were tracked in, else
            ``MLFLOW_TRACKING_URI``, else ``sqlite:///mlflow.db``.
        base_model: where config.json and tokenizer are, if the model that training started from is gone.
        example: prompt of the input example; None takes the first one that the run logged.

    Raises:
        RegistryError, CheckpointError, ArchitectureError, PolicyError: each lists everything that is wrong.
    """
    if problems := [*name_problems(name, alias), *source_problems(source)]:
        raise RegistryError("; ".join(problems))
    registry = Registry(tracking_uri or tracking_uri_of(source), create=Path(source).expanduser().exists())
    with registry.answering():
        found = find_source(source, registry.client)
    checkpoint = read_checkpoint(found.checkpoint, base_model)
    merged = None if checkpoint.adapter is None else load_merged(checkpoint)
    model = load_masters(checkpoint) if merged is None else merged.model
    entry, manifest = _publish(registry, name, alias, found, checkpoint, model, example, merged)
    obstacles = tuple(serving_obstacles(model.plan, model.policy))
    report = None if merged is None else merged.report
    return Registered(entry, registry.uri, found, checkpoint, manifest, obstacles, report)


def _publish(
    registry: Registry,
    name: str,
    alias: str | None,
    found: Source,
    checkpoint: TrainedCheckpoint,
    model: CausalLM,
    example: str | None,
    merged: Merged | None,
) -> tuple[Entry, Manifest]:
    """Writes the package in a temporary directory and uploads it with what is known of its run."""
    metrics = metrics_at(found, registry.client, checkpoint.training_iteration)
    with tempfile.TemporaryDirectory(prefix="rllib_llm_register_") as folder:
        package = Path(folder) / "model"
        package.mkdir()
        base = _base_name(registry, checkpoint)
        lineage = _lineage(found, checkpoint, base) | ({} if merged is None else merged.lineage())
        record = Record(lineage, _attestations(found, model, merged is not None), metrics)
        version, write = checkpoint.weights_version, None if merged is None else merged.write_adapter
        manifest, digest = write_package(model, package, record, weights_version=version, adapter=write)
        what = Upload(
            name,
            alias,
            found,
            prompt=example or _clean(example_prompt(found, registry.client), checkpoint) or _PROMPT,
            tags=_tags(found, checkpoint, manifest, digest),
            metrics=metrics,
            description=(package / CARD_FILE).read_text(encoding="utf-8"),
            step=checkpoint.training_iteration,
        )
        return upload(registry, package, what), manifest


def _base_name(registry: Registry, checkpoint: TrainedCheckpoint) -> str:
    """What training started from, without a directory of this machine: a shipped name, `models:/NAME/VERSION`, or the
    last part of a path."""
    file = checkpoint.base.parent / MANIFEST_FILE
    entry = registry.holding(file_sha256(file)) if file.is_file() else None
    return checkpoint.base_name if entry is None else entry.uri


def _in_its_experiment(checkpoint: Path) -> str:
    """`EXPERIMENT/checkpoint_000010`: what a reader can look for; the path above it is of this machine and user."""
    return "/".join(checkpoint.parts[-2:])


def _lineage(source: Source, checkpoint: TrainedCheckpoint, base: str) -> dict[str, Any]:
    return {
        "run_id": source.run_id,
        "run_name": source.run_name,
        "checkpoint": _in_its_experiment(checkpoint.path),
        "base_model": base,
        "training_iteration": checkpoint.training_iteration,
        "weights_version": checkpoint.weights_version,
        "git_commit": source.run_tags.get("git.rllib_llm.commit"),
        "git_dirty": source.run_tags.get("git.rllib_llm.dirty"),
        "exported_by": git_tags("git", Path(__file__).parent),
    }


def _attestations(source: Source, model: CausalLM, merged: bool) -> dict[str, Any]:
    """Those of the run at its start, and the statement of this process, whose quantiser made the exported bytes.

    merged: the run's are of the model with its adapters apart, whose plan is another one; they are left out.
    """
    export = build_attestation("train", model.policy, model.plan, torch.device("cpu")).to_dict()
    return {**({} if merged else source.attestations), "export": entries.jsonable(export)}


def _tags(source: Source, checkpoint: TrainedCheckpoint, manifest: Manifest, digest: str) -> dict[str, str]:
    lineage = manifest.lineage
    tags = {
        "policy.name": manifest.policy_name,
        "policy.fingerprint": manifest.policy_fingerprint,
        "policy.plan_hash": manifest.plan_hash,
        MANIFEST_TAG: digest,
        "source.run_id": source.run_id,
        "source.checkpoint": lineage["checkpoint"],
        "base_model": lineage["base_model"],
        "training_iteration": str(checkpoint.training_iteration),
        "weights_version": str(checkpoint.weights_version),
        "git.rllib_llm.commit": lineage["git_commit"],
        "git.export.commit": lineage["exported_by"].get("git.commit"),
        "formats": ", ".join(f for f in ("hf", manifest.fp8, manifest.adapter) if f),
        "base_hash": lineage.get("base_hash"),
    }
    return {key: entries.cut(value, entries.MAX_TAG_VALUE) for key, value in tags.items() if value}


def _clean(prompt: str | None, checkpoint: TrainedCheckpoint) -> str | None:
    """A logged prompt without the special tokens that the tokenizer adds again."""
    if prompt is None:
        return None
    for token in load_tokenizer(checkpoint.base).all_special_tokens:
        prompt = prompt.replace(token, "")
    return prompt.strip() or None
