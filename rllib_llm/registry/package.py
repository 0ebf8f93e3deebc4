"""Write a registered model's directory from a learner's model. Knows neither MLflow nor Ray.

<root>/README.md            what this is, for people
       manifest.json        hashes of all that follows
       policy.yaml          the precision policy, complete
       plan.json            the policy on this model: a format for every module
       attestations.json    what learner, engines and this process stated about themselves
       metrics.json         metrics of the run at the iteration of the checkpoint
       hf/                  masters in the compute dtype; transformers' AutoModelForCausalLM reads it
       fp8/                 the bytes of the rollout engine, block-FP8; stock vLLM reads it
       adapter/             of a run that trained adapters: these, for PEFT; hf/ and fp8/ hold the merged model
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precision_policies import PrecisionPolicy
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.checkpoint import copy_side_files, save_pretrained
from rllib_llm.models.paths import CONFIG_FILE, read_json
from rllib_llm.on_disk.owner import Owner
from rllib_llm.registry.card import model_card
from rllib_llm.registry.fp8_format import has_fp8_rollout, write_rollout
from rllib_llm.registry.manifest import Manifest, hash_files, probe_hash
from rllib_llm.sync.export import export_weights

__all__ = [
    "ADAPTER",
    "ATTESTATIONS_FILE",
    "FP8",
    "MASTERS",
    "METRICS_FILE",
    "PLAN_FILE",
    "POLICY_FILE",
    "Record",
    "write_package",
]

MASTERS, FP8, ADAPTER = "hf", "fp8", "adapter"
POLICY_FILE, PLAN_FILE = "policy.yaml", "plan.json"
ATTESTATIONS_FILE, METRICS_FILE, CARD_FILE = "attestations.json", "metrics.json", "README.md"


@dataclass(frozen=True)
class Record:
    """What is known of a model beside its weights; plain data.

    lineage: where it comes from (run, checkpoint, commit, base model, …). attestations: side -> statement. metrics:
    name -> value at the iteration of the checkpoint.
    """

    lineage: dict[str, Any] = field(default_factory=dict)
    attestations: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def write_package(
    model: CausalLM,
    root: Path,
    record: Record,
    *,
    weights_version: int = 1,
    adapter: Callable[[Path], Any] | None = None,
) -> tuple[Manifest, str]:
    """Export `model` (train side, tokenizer beside its `source_path`) into the empty directory `root`.

    Peak memory beside the model: its weights in the compute dtype, then its weights as the rollout holds them.

    Args:
        weights_version: number of the export (>= 1), as samples of these weights carried it.
        adapter: writes the adapters that the model was merged with into a directory.

    Returns:
        The manifest, and the sha256 of its file.
    """
    policy, plan = model.policy, model.plan
    masters = root / MASTERS
    save_pretrained(model, masters, dtype=policy.compute_dtype)
    _forget_origin(masters / "tokenizer_config.json")
    Owner(policy, plan.hash, "masters").write(masters)
    hashes = _write_rollout(model, root, max(1, weights_version))
    if adapter is not None:
        adapter(root / ADAPTER)
    (root / POLICY_FILE).write_text(policy.to_yaml(), encoding="utf-8")
    _write_json(root / PLAN_FILE, plan.to_dict())
    _write_json(root / ATTESTATIONS_FILE, record.attestations)
    _write_json(root / METRICS_FILE, record.metrics)
    card = model_card(policy, plan, record.lineage, record.metrics, _parameters(model))
    (root / CARD_FILE).write_text(card, encoding="utf-8")
    for file in root.rglob("*.safetensors"):
        file.chmod(0o644)  # written as 0600; a server or colleague of another account reads them too
    manifest = Manifest(
        policy_name=policy.name,
        policy_fingerprint=policy.fingerprint,
        plan_hash=plan.hash,
        masters=MASTERS,
        fp8=FP8 if (root / FP8).is_dir() else None,
        files=hash_files(root),
        tensors=hashes,
        tensor_hash_probe=probe_hash(),
        lineage=record.lineage,
        adapter=ADAPTER if adapter is not None else None,
    )
    return manifest, manifest.write(root)


def _forget_origin(file: Path) -> None:
    """Drop what transformers noted of the directory that a tokenizer was read from: a path of some machine and user."""
    if not file.is_file():
        return
    settings = read_json(file)
    kept = {k: v for k, v in settings.items() if not (k.endswith(("name_or_path", "_file")) and _is_path(v))}
    if kept != settings:
        _write_json(file, kept)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~"))


def _write_rollout(model: CausalLM, root: Path, version: int) -> dict[str, str]:
    """Name -> hash of the exported tensors; writes the FP8 directory where the rollout holds FP8."""
    update = export_weights(model, version)
    if has_fp8_rollout(model.plan):
        directory = root / FP8
        directory.mkdir()
        tensors = {name: tensor.unpack() for name, tensor in update.tensors.items()}
        config = json.loads((root / MASTERS / CONFIG_FILE).read_text())
        write_rollout(directory, tensors, config, model.plan)
        copy_side_files(root / MASTERS, directory)
        Owner(model.policy, model.plan.hash, "rollout").write(directory)
    return dict(update.hashes)


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _parameters(model: CausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def serving_environment(policy: PrecisionPolicy) -> dict[str, str]:
    """Environment variables under which stock vLLM on a GPU computes with the exported bytes."""
    return policy.environment(engine="vllm", device="cuda")
