"""What an engine checks before it applies anything of a weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rllib_llm.sync.packed import SCALE_SUFFIX, PackedTensor, WeightSyncError, WeightUpdate


@dataclass(frozen=True)
class TensorSpec:
    """dtype name (`rllib_llm.sync.packed.DTYPES`) and shape that a receiver expects under a name."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightReceipt:
    """What an engine holds after an update: hashes of its own tensors, taken after they were applied."""

    version: int
    policy_fingerprint: str
    plan_hash: str
    hashes: Mapping[str, str]


def verify_update(
    update: WeightUpdate,
    expected: Mapping[str, TensorSpec],
    policy_fingerprint: str,
    plan_hash: str,
) -> None:
    """Compare an update with what the receiver needs, before any of it is applied.

    Raises:
        WeightSyncError: lists all of: another policy or plan; missing or unknown tensors; wrong dtype,
            shape or number of bytes; bytes that do not have the hash that the sender computed.
    """
    problems = []
    if update.policy_fingerprint != policy_fingerprint:
        problems.append(
            f"policy fingerprint {update.policy_fingerprint[:16]}…, this engine runs "
            f"{policy_fingerprint[:16]}…: build both "
            "sides from one policy"
        )
    if update.plan_hash != plan_hash:
        problems.append(
            f"plan hash {update.plan_hash[:16]}…, this engine's is {plan_hash[:16]}…: the model "
            f"configurations differ"
        )
    problems += [
        f"{name}: missing{_sibling_hint(name, update)}"
        for name in sorted(set(expected) - set(update.tensors))
    ]
    problems += [f"{name}: unknown to this model" for name in sorted(set(update.tensors) - set(expected))]
    problems += [
        f"{name}: hash without a tensor" for name in sorted(set(update.hashes) - set(update.tensors))
    ]
    for name in sorted(set(expected) & set(update.tensors)):
        problems += [f"{name}: {p}" for p in _tensor_problems(name, update, expected[name])]
    if problems:
        raise WeightSyncError(problems, update.version)


def _sibling_hint(name: str, update: WeightUpdate) -> str:
    """Half of a quantised pair is the commonest partial update; say which half came."""
    other = name.removesuffix(SCALE_SUFFIX) if name.endswith(SCALE_SUFFIX) else name + SCALE_SUFFIX
    return f" (while {other} came)" if other in update.tensors else ""


def _tensor_problems(name: str, update: WeightUpdate, spec: TensorSpec) -> list[str]:
    tensor: PackedTensor = update.tensors[name]
    problems = tensor.problems()
    if tensor.dtype != spec.dtype:
        problems.append(f"dtype {tensor.dtype}, the plan says {spec.dtype}")
    if tuple(tensor.shape) != spec.shape:
        problems.append(f"shape {list(tensor.shape)}, the plan says {list(spec.shape)}")
    sent = update.hashes.get(name)
    if sent is None:
        problems.append("no hash was sent for it")
    elif not problems and tensor.hash() != sent:
        problems.append(f"bytes hash to {tensor.hash()[:16]}…, sent as {sent[:16]}…: damaged on the way")
    return problems
