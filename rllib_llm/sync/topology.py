"""By which transport weights travel, decided from where the two processes are."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed

from rllib_llm.errors import RllibLLMError
from rllib_llm.settings.groups import WeightTransport

Transport = Literal["in_process", "cuda_ipc", "nccl", "gloo", "object_store"]
STREAMED: tuple[Transport, ...] = ("cuda_ipc", "nccl", "gloo")
"""Transports on which bytes flow through a bounded buffer while both sides take part."""


class WeightTransportError(RllibLLMError, RuntimeError):
    """A transport that cannot be used between two processes, or that broke."""


@dataclass(frozen=True)
class Place:
    """Where a holder of weights is.

    Attributes:
        host: boot id of the machine and its IPC namespace: equal for processes that can share memory.
        pid: process id on that host.
        device: "cpu" or "cuda".
        gpu: UUID of the GPU, not its index: indices depend on CUDA_VISIBLE_DEVICES. None on a CPU.
        nccl: this process's torch has NCCL.
        identity: of this one engine or learner; a restarted one has another.
    """

    host: str
    pid: int
    device: str
    gpu: str | None
    nccl: bool
    identity: str

    def __str__(self) -> str:
        return f"process {self.pid} on {f'GPU {self.gpu}' if self.gpu else 'the CPU'} of host {self.host[:8]}"


def place_of(device: torch.device | str) -> Place:
    """The place of a model on `device` in this process, with a new identity."""
    device = torch.device(device)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Place(_host(), os.getpid(), device.type, gpu, nccl, uuid.uuid4().hex)


@functools.cache
def _host() -> str:
    parts = []
    for read in (
        lambda: open("/proc/sys/kernel/random/boot_id").read().strip(),  # noqa: SIM115
        lambda: os.readlink("/proc/self/ns/ipc") + os.readlink("/proc/self/ns/pid"),
    ):
        try:
            parts.append(read())
        except OSError:  # not Linux: the name of the host is all there is
            parts.append(socket.gethostname())
    return "|".join(parts)


def choose_transport(
    learner: Place, engine: Place, wanted: WeightTransport = "auto"
) -> tuple[Transport, str]:
    """(transport, why) between two places.

    Raises:
        ValueError: `wanted` is no transport.
        WeightTransportError: the transport asked for cannot be used here; says why and what to do.
    """
    if wanted not in get_args(WeightTransport):
        raise ValueError(f"weight_transport={wanted!r} must be one of {', '.join(get_args(WeightTransport))}")
    if wanted != "auto":
        obstacle = _OBSTACLES[wanted](learner, engine)
        if obstacle:
            raise WeightTransportError(
                f"weight_transport={wanted}: {obstacle} (learner: {learner}; engine: {engine}). "
                "Use weight_transport=auto, or another placement"
            )
        return wanted, "asked for"
    if (learner.host, learner.pid) == (engine.host, engine.pid):
        return "in_process", "learner and engine are one process"
    found: list[str] = []
    for transport in ("cuda_ipc", "nccl"):
        obstacle = _OBSTACLES[transport](learner, engine)
        if obstacle is None:
            return transport, "; ".join([*found, f"{transport} fits"])
        found.append(f"no {transport}: {obstacle}")
    return "object_store", "; ".join(found)


def _ipc_obstacle(learner: Place, engine: Place) -> str | None:
    if learner.host != engine.host:
        return "learner and engine are on different hosts (or in containers that share no memory)"
    if learner.gpu is None or learner.gpu != engine.gpu:
        return "learner and engine are not on the same GPU"
    if learner.pid == engine.pid:
        return "learner and engine are one process, which cannot open its own memory"
    return None


def _nccl_obstacle(learner: Place, engine: Place) -> str | None:
    if learner.gpu is None or engine.gpu is None:
        return "one side is on the CPU"
    if learner.gpu == engine.gpu:
        return "NCCL refuses two processes on one GPU"
    if not (learner.nccl and engine.nccl):
        return "torch was built without NCCL"
    return None


def _gloo_obstacle(learner: Place, engine: Place) -> str | None:
    return "both are one process" if (learner.host, learner.pid) == (engine.host, engine.pid) else None


_OBSTACLES: Mapping[str, Callable[[Place, Place], str | None]] = {
    "cuda_ipc": _ipc_obstacle,
    "nccl": _nccl_obstacle,
    "gloo": _gloo_obstacle,
    "object_store": lambda learner, engine: None,
}
