"""Is a registered model what it says it is? Hashes again, and quantises the masters again; collects every violation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precision_policies import Plan, PolicyError, PrecisionPolicy
from precision_policies.hashing import differing
from precision_policies.loading import from_yaml
from rllib_llm.models.checkpoint import check_weights, load_config, parameter_shapes
from rllib_llm.models.paths import CONFIG_FILE
from rllib_llm.models.safetensor_files import ModelFilesError, read_tensors, tensor_files
from rllib_llm.on_disk.owner import OwnerFileError, owner_of
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.fp8_format import quantization_config
from rllib_llm.registry.hashes import derived_rollout, file_sha256
from rllib_llm.registry.manifest import MANIFEST_FILE, Manifest, ManifestError, probe_hash
from rllib_llm.registry.mlflow_registry import MANIFEST_TAG
from rllib_llm.registry.package import ATTESTATIONS_FILE, PLAN_FILE, POLICY_FILE
from rllib_llm.weights.format import SCALE_SUFFIX, hash_tensors

__all__ = ["Verdict", "verify_package"]


@dataclass(frozen=True)
class Verdict:
    """What was looked at and what is wrong. `violations` is empty for a model that is whole.

    rederived: tensors of the rollout that were made again from the masters and compared with their hashes, and bit for
    bit with the FP8 directory where there is one. notes: what could not be compared, and why.
    """

    violations: tuple[str, ...]
    notes: tuple[str, ...]
    files: int
    nbytes: int
    rederived: int
    manifest: Manifest | None


def verify_package(root: Path, tags: Mapping[str, str]) -> Verdict:
    """Check the directory of a registered model against its manifest, its own contents, and the registry's tags.

    Args:
        root: see `rllib_llm.registry.package`.
        tags: of the model version. They lie in the registry's database, not beside the files, so that a manifest which
            was rewritten together with a file does not pass.
    """
    try:
        manifest = Manifest.read(root)
    except ManifestError as error:
        return Verdict((str(error),), (), 0, 0, 0, None)
    found = list(_against_tags(root, manifest, tags))
    found += _files(root, manifest)
    policy = _policy(root, manifest, found)
    plan = _plan(root, manifest, policy, found) if policy is not None else None
    notes: list[str] = []
    rederived = 0
    if policy is not None and plan is not None:
        found += _folders(root, manifest, plan)
        rederived = _rollout(root, manifest, policy, plan, found, notes)
    found += _attestations(root, manifest)
    nbytes = sum(int(entry["bytes"]) for entry in manifest.files.values())
    return Verdict(tuple(found), tuple(notes), len(manifest.files), nbytes, rederived, manifest)


def _against_tags(root: Path, manifest: Manifest, tags: Mapping[str, str]) -> Iterator[str]:
    facts = {
        MANIFEST_TAG: file_sha256(root / MANIFEST_FILE),
        "policy.fingerprint": manifest.policy_fingerprint,
        "policy.plan_hash": manifest.plan_hash,
    }
    for tag, value in facts.items():
        if tags.get(tag) != value:
            yield (
                f"{MANIFEST_FILE}: {tag} is {value[:16]}…, the registry's tag says {str(tags.get(tag))[:16]}…: one of "
                "them was changed after registration"
            )


def _files(root: Path, manifest: Manifest) -> Iterator[str]:
    there = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}
    there.pop(MANIFEST_FILE, None)
    yield from (f"{name}: missing" for name in sorted(manifest.files.keys() - there.keys()))
    yield from (f"{name}: not in the manifest" for name in sorted(there.keys() - manifest.files.keys()))
    for name in sorted(manifest.files.keys() & there.keys()):
        stated, size = manifest.files[name], there[name].stat().st_size
        if size != stated["bytes"]:
            yield f"{name}: {size} bytes, registered were {stated['bytes']}"
        elif (digest := file_sha256(there[name])) != stated["sha256"]:
            yield f"{name}: sha256 {digest[:16]}…, registered was {stated['sha256'][:16]}…"


def _policy(root: Path, manifest: Manifest, found: list[str]) -> PrecisionPolicy | None:
    try:
        policy = from_yaml((root / POLICY_FILE).read_text(encoding="utf-8"), POLICY_FILE)
    except (OSError, UnicodeDecodeError, PolicyError) as error:
        found.append(f"{POLICY_FILE}: cannot be read: {error}")
        return None
    if policy.fingerprint != manifest.policy_fingerprint:
        found.append(
            f"{POLICY_FILE}: fingerprint {policy.fingerprint[:16]}…, registered was {manifest.policy_fingerprint[:16]}…"
        )
    return policy


def _plan(root: Path, manifest: Manifest, policy: PrecisionPolicy, found: list[str]) -> Plan | None:
    """The policy on the model's config; compared with the manifest's hash and with the plan that lies there."""
    try:
        _json_object(root / manifest.masters / CONFIG_FILE)
        plan = policy.resolve(load_config(root / manifest.masters))
    except (OSError, ValueError) as error:
        found.append(f"{manifest.masters}/{CONFIG_FILE}: cannot be resolved under the policy: {error}")
        return None
    if plan.hash != manifest.plan_hash:
        found.append(
            f"plan: the policy on this config gives {plan.hash[:16]}…, registered was {manifest.plan_hash[:16]}…"
        )
    try:
        written = Plan.from_dict(json.loads((root / PLAN_FILE).read_text(encoding="utf-8")))
        if written.hash != manifest.plan_hash:
            found.append(f"{PLAN_FILE}: hash {written.hash[:16]}…, registered was {manifest.plan_hash[:16]}…")
    except (OSError, ValueError) as error:
        found.append(f"{PLAN_FILE}: cannot be read: {error}")
    return plan


def _folders(root: Path, manifest: Manifest, plan: Plan) -> Iterator[str]:
    """What each model directory says about its policy and format."""
    for folder in (manifest.masters, *([manifest.fp8] if manifest.fp8 else [])):
        try:
            owner = owner_of(root / folder)
        except (RegistryError, OwnerFileError, PolicyError) as error:
            yield str(error)
            continue
        if owner is None or owner.policy.fingerprint != manifest.policy_fingerprint:
            stated = "none" if owner is None else f"{owner.policy.fingerprint[:16]}…"
            yield f"{folder}: states policy {stated}, registered was {manifest.policy_fingerprint[:16]}…"
    if manifest.fp8:
        try:
            config = _json_object(root / manifest.fp8 / CONFIG_FILE)
        except (OSError, ValueError) as error:
            yield f"{manifest.fp8}/{CONFIG_FILE}: cannot be read: {error}"
            return
        if config.get("quantization_config") != quantization_config(plan):
            yield f"{manifest.fp8}/{CONFIG_FILE}: quantization_config is not that of the plan"


def _rollout(
    root: Path, manifest: Manifest, policy: PrecisionPolicy, plan: Plan, found: list[str], notes: list[str]
) -> int:
    """Make every tensor of the rollout again from the masters; compare hashes, and bytes with the FP8 directory."""
    masters, fp8 = root / manifest.masters, None if manifest.fp8 is None else root / manifest.fp8
    try:
        check_weights(masters, policy)
        held = {} if fp8 is None else tensor_files(fp8)
        files, names = tensor_files(masters), list(parameter_shapes(plan))
    except (ModelFilesError, OSError) as error:
        found.append(f"tensors were not compared: {error}")
        return 0
    comparable = manifest.tensor_hash_probe == probe_hash()
    if not comparable:
        notes.append(
            "tensor hashes were made by another hash function than today's; files and bytes were compared"
        )
    seen = set()
    for name, tensor in derived_rollout(plan, policy, files, names):
        seen.add(name)
        if name not in manifest.tensors:
            found.append(f"{name}: no hash in the manifest")
        elif comparable and differing(hash_tensors({name: tensor}), {name: manifest.tensors[name]}):
            found.append(
                f"{name}: made again from the masters it has another hash than the rollout's weights had"
            )
        if fp8 is not None:
            found += _same_bytes(name, tensor, held)
    extra = (manifest.tensors.keys() | held.keys()) - seen
    found += [f"{name}: not a tensor of this model" for name in sorted(extra)]
    return len(seen)


def _same_bytes(name: str, made: torch.Tensor, held: Mapping[str, Path]) -> list[str]:
    if name not in held:
        return [f"{name}: not in the FP8 directory"]
    [(_, tensor)] = read_tensors(held, [name])
    if tensor.dtype != made.dtype or tensor.shape != made.shape:
        there, wanted = (f"{t.dtype} {list(t.shape)}" for t in (tensor, made))
        return [f"{name}: {there} in the FP8 directory, the policy gives {wanted}"]
    different = int((_flat(tensor) != _flat(made)).sum())
    what = "scales" if name.endswith(SCALE_SUFFIX) else "values"
    problem = f"{name}: {different} bytes of its {what} are not those that the policy makes of the masters"
    return [problem] if different else []


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _json_object(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} where an object is expected")
    return found


def _attestations(root: Path, manifest: Manifest) -> Iterator[str]:
    try:
        sides = _json_object(root / ATTESTATIONS_FILE)
    except (OSError, ValueError) as error:
        yield f"{ATTESTATIONS_FILE}: cannot be read: {error}"
        return
    wanted = {"policy_fingerprint": manifest.policy_fingerprint, "plan_hash": manifest.plan_hash}
    for side, stated in sorted(sides.items()):
        if not isinstance(stated, dict):
            yield f"{ATTESTATIONS_FILE}: {side} must be an object"
            continue
        for key, value in wanted.items():
            if stated.get(key) != value:
                shown = f"{key} {str(stated.get(key))[:16]}…"
                yield f"{ATTESTATIONS_FILE}: {side} attested {shown}, the model's is {value[:16]}…"
