"""What an engine checks before it applies anything of a weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from precision_kernels.reference.quantise import block_scales
from precision_policies import PrecisionPolicy
from precision_policies.hashing import differing
from rllib_llm.sync.packed import PackedTensor, WeightSyncError, WeightUpdate
from rllib_llm.weights.base import base_hash, is_adapter
from rllib_llm.weights.format import SCALE_SUFFIX, TensorSpec


@dataclass(frozen=True)
class ScaleRange:
    """The scales that a policy's quantiser can make (`precision_kernels.reference.quantise`).

    Attributes:
        smallest: the policy's scale floor.
        largest: of a block that holds the compute dtype's largest number.
        power_of_two: whether all are.
    """

    smallest: float
    largest: float
    power_of_two: bool

    @classmethod
    def of(cls, policy: PrecisionPolicy) -> ScaleRange:
        largest = torch.tensor([torch.finfo(getattr(torch, policy.compute_dtype)).max], dtype=torch.float32)
        scales = block_scales(torch.cat((torch.zeros(1), largest)), policy.scale_format, policy.scale_floor)
        return cls(float(scales[0]), float(scales[1]), policy.scale_format == "ue8m0")

    def problems(self, name: str, scales: torch.Tensor) -> list[str]:
        """What no quantiser made among fp32 scales, one sentence; empty if nothing."""
        wrong = ~((scales >= self.smallest) & (scales <= self.largest))  # NaN is wrong too
        if self.power_of_two:
            wrong |= torch.frexp(scales).mantissa != 0.5
        if not bool(wrong.any()):
            return []
        first = float(scales[wrong].flatten()[0])
        kind = "powers of two " if self.power_of_two else ""
        return [
            f"{name}: {int(wrong.sum())} of {scales.numel()} scales are none that the policy's quantiser makes (the "
            f"first: {first!r}; it makes {kind}from {self.smallest:.6g} to {self.largest:.6g}): the sender's weights "
            "are damaged, or quantised by something else"
        ]


@dataclass(frozen=True)
class WeightManifest:
    """All that is said about a weight update but its bytes: what a receiver can judge before any byte travels.

    Attributes:
        version: counts the learner's exports; samples carry it.
        policy_fingerprint, plan_hash: under which policy and plan the bytes were made.
        specs: name -> dtype and shape, in the order in which tensors are sent.
        hashes: name -> hash (`rllib_llm.weights.format.tensor_hash`), made by the sender.
        base: of an update of adapters alone, the hash of the weights that they are on (`rllib_llm.sync.base`).
    """

    version: int
    policy_fingerprint: str
    plan_hash: str
    specs: Mapping[str, TensorSpec]
    hashes: Mapping[str, str]
    base: str | None = None

    @classmethod
    def of(cls, update: WeightUpdate) -> WeightManifest:
        """The manifest of an update whose bytes are at hand."""
        specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in update.tensors.items()}
        return cls(
            update.version, update.policy_fingerprint, update.plan_hash, specs, update.hashes, update.base
        )

    def of_adapters(self) -> WeightManifest:
        """The part of it that is sent to an engine which holds the base already."""
        specs = {name: spec for name, spec in self.specs.items() if is_adapter(name)}
        hashes = {name: self.hashes[name] for name in specs}
        return replace(self, specs=specs, hashes=hashes, base=base_hash(self.hashes))


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
    device: torch.device | str = "cpu",
    scales: ScaleRange | None = None,
) -> None:
    """Compare an update with what the receiver needs, before any of it is applied.

    Args:
        device: where to hash the bytes.
        scales: what scales may be; None looks at no values.

    Raises:
        WeightSyncError: lists all of `manifest_problems`, and: wrong number of bytes; bytes that do not have the hash
            that the sender computed; scales that no quantiser makes.
    """
    manifest = WeightManifest.of(update)
    problems = manifest_problems(manifest, expected, policy_fingerprint, plan_hash)
    for name in sorted(set(expected) & set(update.tensors)):
        tensor: PackedTensor = update.tensors[name]
        own = [f"{name}: {p}" for p in tensor.problems()]
        if not own and name in update.hashes and not _spec_problems(name, manifest, expected[name]):
            own = hash_problems({name: tensor.hash(device)}, {name: update.hashes[name]})
            if not own and scales is not None and name.endswith(SCALE_SUFFIX):
                own = scales.problems(name, tensor.view())
        problems += own
    if problems:
        raise WeightSyncError(problems, update.version)


def verify_manifest(
    manifest: WeightManifest,
    expected: Mapping[str, TensorSpec],
    policy_fingerprint: str,
    plan_hash: str,
) -> None:
    """Compare what is announced with what the receiver needs, before any byte travels.

    Raises:
        WeightSyncError: lists all of `manifest_problems`.
    """
    problems = manifest_problems(manifest, expected, policy_fingerprint, plan_hash)
    if problems:
        raise WeightSyncError(problems, manifest.version)


def manifest_problems(
    manifest: WeightManifest,
    expected: Mapping[str, TensorSpec],
    policy_fingerprint: str,
    plan_hash: str,
) -> list[str]:
    """Another policy or plan; missing or unknown tensors; wrong dtype or shape; a hash without tensor or a tensor
    without hash.
    """
    problems = []
    if manifest.policy_fingerprint != policy_fingerprint:
        problems.append(
            f"policy fingerprint {manifest.policy_fingerprint[:16]}…, this engine runs "
            f"{policy_fingerprint[:16]}…: build both "
            "sides from one policy"
        )
    if manifest.plan_hash != plan_hash:
        problems.append(
            f"plan hash {manifest.plan_hash[:16]}…, this engine's is {plan_hash[:16]}…: the model "
            f"configurations differ"
        )
    sent = manifest.specs
    problems += [f"{n}: missing{_sibling_hint(n, sent)}" for n in sorted(set(expected) - set(sent))]
    problems += [f"{n}: unknown to this model" for n in sorted(set(sent) - set(expected))]
    problems += [f"{n}: hash without a tensor" for n in sorted(set(manifest.hashes) - set(sent))]
    for name in sorted(set(expected) & set(sent)):
        problems += _spec_problems(name, manifest, expected[name])
        if name not in manifest.hashes:
            problems.append(f"{name}: no hash was sent for it")
    return problems


def hash_problems(found: Mapping[str, str], sent: Mapping[str, str]) -> list[str]:
    """Tensors whose bytes, as they arrived, do not have the hash that the sender computed."""
    return [
        f"{name}: bytes hash to {arrived[:16]}…, sent as {announced[:16]}…: damaged on the way"
        for name, (arrived, announced) in differing(found, sent).items()
        if arrived is not None and announced is not None
    ]


def _sibling_hint(name: str, sent: Mapping[str, TensorSpec]) -> str:
    """Half of a quantised pair is the commonest partial update; say which half came."""
    other = name.removesuffix(SCALE_SUFFIX) if name.endswith(SCALE_SUFFIX) else name + SCALE_SUFFIX
    return f" (while {other} came)" if other in sent else ""


def _spec_problems(name: str, manifest: WeightManifest, spec: TensorSpec) -> list[str]:
    sent = manifest.specs[name]
    problems = []
    if sent.dtype != spec.dtype:
        problems.append(f"{name}: dtype {sent.dtype}, the plan says {spec.dtype}")
    if tuple(sent.shape) != spec.shape:
        problems.append(f"{name}: shape {list(sent.shape)}, the plan says {list(spec.shape)}")
    return problems
