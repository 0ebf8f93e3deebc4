"""A checkpoint of adapters as one model: W + scale * B A, and what of the sum the formats of the weights lose.

Training never merges. A merged weight is rounded once more, to the compute dtype and perhaps to FP8, and where the
update of an element is below half a step of that format it vanishes. So the merged model is another function than the
one that was trained and sampled from; `MergeReport` says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from precision_kernels import BLOCK, FP8, FP8_MAX, LowHalf, join_float32, quantise_weight
from precision_policies import AdapterSpec
from precision_policies.adapters import A, B
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.checkpoint import load_pretrained
from rllib_llm.models.layers import PlannedLinear, scale_rule
from rllib_llm.models.peft_files import write_adapter
from rllib_llm.models.safetensor_files import read_tensors, tensor_files
from rllib_llm.on_disk.checkpoint import CheckpointError
from rllib_llm.registry.masters import TrainedCheckpoint
from rllib_llm.sync.export import export_manifest
from rllib_llm.weights.base import base_hash

__all__ = ["MergeReport", "Merged", "load_merged"]


@dataclass(frozen=True)
class MergeReport:
    """Shares of the elements with an update that are, after it, the number that they were before.

    lost_in_compute_dtype: in the weights of hf/. lost_in_fp8: in the codes of fp8/, at one scale; None without FP8.
    updated: elements whose update is not zero.
    """

    lost_in_compute_dtype: float
    lost_in_fp8: float | None
    updated: int


@dataclass(frozen=True)
class Merged:
    """A merged model (train side, without adapters), the adapters by name, and what the merge lost."""

    model: CausalLM
    values: Mapping[str, torch.Tensor]
    checkpoint: TrainedCheckpoint
    report: MergeReport

    def lineage(self) -> dict[str, Any]:
        """What a registered model says of it: the base by its hash, the adapters, the loss."""
        assert self.checkpoint.adapter is not None
        return {
            "adapter": self.checkpoint.adapter.to_dict(),
            "base_hash": self.checkpoint.base_hash,
            "merge": asdict(self.report),
        }

    def write_adapter(self, directory: Path) -> None:
        """The adapters as a PEFT directory."""
        write_adapter(directory, self.values, self.checkpoint.adapter, self.checkpoint.base_name)


def load_merged(checkpoint: TrainedCheckpoint) -> Merged:
    """The base with a checkpoint's adapters merged into its FP32 weights, on the CPU.

    A and B are rounded to the compute dtype first, as they were in training.

    Raises:
        CheckpointError: the base has other weights than the one that was trained on, or tensors are missing, unknown
            or of another shape; lists all.
    """
    spec = checkpoint.adapter
    assert spec is not None  # the caller looks
    model = load_pretrained(checkpoint.base, checkpoint.policy, "train")
    found = base_hash(export_manifest(model, 1).hashes)
    if found != checkpoint.base_hash:
        raise CheckpointError(
            f"{checkpoint.path}: its adapters were trained on weights with hash {str(checkpoint.base_hash)[:16]}…, "
            f"{checkpoint.base} holds {found[:16]}…: give the right one with --base-model"
        )
    values = _adapters(checkpoint, model, spec)
    tally = _Tally()
    for name in sorted({name.rpartition(".")[0] for name in values}):
        linear = model.get_submodule(name)
        assert isinstance(linear, PlannedLinear)  # `_adapters` has compared the names with the plan
        _merge(linear, values[f"{name}.{A}"], values[f"{name}.{B}"], spec.scale, tally)
    return Merged(model, values, checkpoint, tally.report())


def _adapters(checkpoint: TrainedCheckpoint, model: CausalLM, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """FP32 A and B by name (``X.lora_A``)."""
    plan = checkpoint.policy.resolve(model.config, spec)
    wanted = {row.name: tuple(row.shape) for row in plan.modules if row.kind == "adapter"}
    files = tensor_files(checkpoint.weights_folder)
    stored = dict(read_tensors(files, files))
    values: dict[str, torch.Tensor] = {}
    problems = [
        f"{n}: not an adapter of {checkpoint.base}" for n in stored if n.rpartition(".")[0] not in wanted
    ]
    for name, shape in wanted.items():
        tensor = stored.get(f"{name}.weight")
        low, ties = (stored.get(f"{name}.weight_{part}") for part in ("low", "ties"))
        if tensor is None or tuple(tensor.shape) != shape:
            problems.append(
                f"{name}: {'missing' if tensor is None else list(tensor.shape)}, expected {list(shape)}"
            )
        elif low is not None and ties is not None:
            values[name] = join_float32(tensor, LowHalf(low, ties))
        else:
            values[name] = tensor.float()
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise CheckpointError(f"{checkpoint.path}: its adapters do not fit:\n{lines}")
    return values


class _Tally:
    def __init__(self) -> None:
        self.updated = self.lost = self.lost_fp8 = 0
        self.fp8 = False

    def report(self) -> MergeReport:
        count = max(1, self.updated)
        return MergeReport(self.lost / count, self.lost_fp8 / count if self.fp8 else None, self.updated)


@torch.no_grad()
def _merge(linear: PlannedLinear, a: torch.Tensor, b: torch.Tensor, scale: float, tally: _Tally) -> None:
    compute = linear.compute_dtype
    before = linear.master("weight").float().clone()  # `set_master` writes into the master itself
    update = scale * (b.to(compute).float() @ a.to(compute).float())
    linear.set_master("weight", before + update)
    after = linear.master("weight").float()
    moved = update != 0
    tally.updated += int(moved.sum())
    tally.lost += int((moved & (before.to(compute) == after.to(compute))).sum())
    if linear.plan.rollout_forward == "fp8":
        tally.fp8 = True
        # In the scales of the sum: with its own, a block whose largest element moved would seem to move as a whole.
        new = quantise_weight(after.to(compute), *scale_rule(linear.policy))
        rows, columns = new.shape
        scales = new.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        old = (before.to(compute).float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        tally.lost_fp8 += int((moved & (old.float() == new.codes.float())).sum())
