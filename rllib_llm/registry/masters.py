"""From a training checkpoint to the learner's model, on the CPU, without unpickling anything.

The weights are safetensors, the policy and the base model are in the checkpoint's JSON metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precision_policies import AdapterSpec, PolicyError, PrecisionPolicy, load_policy
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.checkpoint import load_config
from rllib_llm.models.paths import ModelPathError, resolve_model_path
from rllib_llm.models.safetensor_files import read_tensors, tensor_files
from rllib_llm.on_disk.checkpoint import (
    LEARNER_FOLDER,
    MODULE_FOLDER,
    CheckpointError,
    read_metadata,
    verify_files,
)

__all__ = ["TrainedCheckpoint", "load_masters", "read_checkpoint"]


@dataclass(frozen=True)
class TrainedCheckpoint:
    """What a checkpoint says about itself.

    base: directory with config.json and tokenizer, the one that training started from. adapter, base_hash: of a run
    that trained low-rank adapters, and the weights that they are on (`rllib_llm.weights.base`).
    """

    path: Path
    policy: PrecisionPolicy
    base_model: str
    base: Path
    weights_version: int
    training_iteration: int
    adapter: AdapterSpec | None = None
    base_hash: str | None = None

    @property
    def base_name(self) -> str:
        """What training started from, without a directory of this machine: a name as it is, a model in the hub's cache
        as `ORGANISATION/MODEL`, of any other path the last part."""
        path = Path(self.base_model).expanduser()
        if not path.is_absolute() and not path.is_dir():
            return self.base_model
        cached = [part for part in path.parts if part.startswith("models--")]
        return cached[-1].removeprefix("models--").replace("--", "/") if cached else path.name

    @property
    def weights_folder(self) -> Path:
        """The folder of the checkpoint that holds the learner's weights."""
        return self.path / LEARNER_FOLDER / MODULE_FOLDER


def read_checkpoint(path: Path, base_model: str | None = None) -> TrainedCheckpoint:
    """Read a checkpoint's metadata and look whether all that an export needs is there.

    Args:
        base_model: where config.json and tokenizer are, instead of the model that training started from.

    Raises:
        CheckpointError: lists what is missing or contradicts itself.
    """
    path = path.expanduser().absolute()
    verify_files(str(path))
    saved = read_metadata(str(path))
    problems: list[str] = []
    policy, base = _policy(saved, problems), _base(saved, base_model, problems)
    adapter = _adapter(saved, problems)
    if problems or policy is None or base is None:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise CheckpointError(f"checkpoint {path} cannot be exported, {len(problems)} problem(s):\n{lines}")
    return TrainedCheckpoint(
        path,
        policy,
        str(base_model or saved["model"]),
        base,
        int(saved.get("weights_version", 1)),
        int(saved.get("training_iteration", 0)),
        adapter,
        saved.get("base_hash"),
    )


def _adapter(saved: dict[str, Any], problems: list[str]) -> AdapterSpec | None:
    if saved.get("adapter") is None:
        return None
    try:
        return AdapterSpec.from_dict(saved["adapter"])
    except (PolicyError, TypeError, AttributeError) as error:
        problems.append(f"its adapters cannot be read: {error}")
        return None


def _policy(saved: dict[str, Any], problems: list[str]) -> PrecisionPolicy | None:
    try:
        policy = load_policy(saved["policy"])
    except (KeyError, PolicyError) as error:
        problems.append(f"its policy cannot be read: {error!r}")
        return None
    if policy.fingerprint != saved.get("fingerprint"):
        problems.append(
            f"its policy has fingerprint {policy.fingerprint[:16]}…, the metadata states "
            f"{str(saved.get('fingerprint'))[:16]}…: the metadata was changed"
        )
    return policy


def _base(saved: dict[str, Any], given: str | None, problems: list[str]) -> Path | None:
    named = given or saved.get("model")
    if not named:
        problems.append("it does not say which model training started from: give --base-model DIR")
        return None
    try:
        return resolve_model_path(named)
    except ModelPathError as error:
        problems.append(
            "a checkpoint holds weights, but neither config.json nor tokenizer; those of the model that training "
            f"started from are needed, and {error} Give --base-model DIR with the same config and tokenizer."
        )
        return None


def load_masters(checkpoint: TrainedCheckpoint) -> CausalLM:
    """The learner's model with the checkpoint's master weights, side "train", on the CPU.

    Raises:
        CheckpointError: tensors are missing, unknown, of another shape, or not in the policy's master dtype; lists all.
    """
    model = build_model(load_config(checkpoint.base), checkpoint.policy, "train")
    model.source_path = checkpoint.base
    files = tensor_files(checkpoint.weights_folder)
    own = model.state_dict()
    problems = [f"{name}: missing" for name in sorted(own.keys() - files.keys())]
    problems += [f"{name}: not part of {checkpoint.base}" for name in sorted(files.keys() - own.keys())]
    with torch.no_grad():
        for name, tensor in read_tensors(files, files.keys() & own.keys()):
            expected = own[name]
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                problems.append(
                    f"{name}: {tensor.dtype} {list(tensor.shape)}, expected {expected.dtype} {list(expected.shape)}"
                )
            else:
                expected.copy_(tensor)
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise CheckpointError(
            f"{checkpoint.path}: its weights are not those of {checkpoint.base} under policy "
            f"'{checkpoint.policy.name}':\n{lines}"
        )
    return model
