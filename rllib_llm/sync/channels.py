"""How one bucket of bytes gets from the learner's buffer into an engine's process: CUDA IPC, or a broadcast.

Both ends call in step: the learner `send(k, n)`, every engine `receive(k, n)` and, when it has read the bytes,
`release(k)`. Memory beyond the weights is one bucket in the learner, and for a broadcast one in each engine.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from rllib_llm.sync.rendezvous import Meeting
from rllib_llm.sync.topology import WeightTransportError


class SendingEnd(Protocol):
    """The learner's end."""

    def send(self, index: int, count: int) -> None:
        """Bucket `index` lies in the first `count` bytes of the learner's buffer; returns when it may be refilled."""


class ReceivingEnd(Protocol):
    """An engine's end."""

    def receive(self, index: int, count: int) -> torch.Tensor:
        """uint8 [count], to be read until `release`."""

    def release(self, index: int) -> None:
        """The bytes of bucket `index` have been read."""

    def close(self) -> None:
        """Give memory back."""


# ---------------------------------------------------------------------- CUDA IPC


@dataclass(frozen=True)
class SharedBuffer:
    """A CUDA allocation as another process can open it: what torch's own CUDA sharing sends, as plain data."""

    handle: bytes
    nbytes: int
    offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    @classmethod
    def share(cls, buffer: torch.Tensor) -> SharedBuffer:
        """For one engine: torch counts an opened buffer per `share`.

        Raises:
            WeightTransportError: CUDA cannot export this memory.
        """
        try:
            _, *rest = buffer.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise WeightTransportError(
                f"CUDA cannot share the learner's buffer with other processes ({error}); memory of "
                "expandable segments (PYTORCH_CUDA_ALLOC_CONF) is a known cause. Use another weight_transport"
            ) from error
        return cls(*rest)

    def open(self, device: torch.device) -> torch.Tensor:
        """uint8 [nbytes] in this process; WeightTransportError if CUDA refuses."""
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index or 0,
                self.handle,
                self.nbytes,
                self.offset,
                self.counter_handle,
                self.counter_offset,
                self.event_handle,
                self.event_sync_required,
            )
        except RuntimeError as error:
            raise WeightTransportError(
                f"CUDA refused to open the learner's buffer in this process ({error}); "
                "use weight_transport=nccl or object_store"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class IPCSender:
    """The buffer is the message; keys say when it is full and when all engines have read it."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.meeting, self.device = meeting, device

    def send(self, index: int, count: int) -> None:
        _finish(self.device)  # other processes do not see this process's stream order
        self.meeting.put(f"full/{index}")
        ranks = range(1, self.meeting.engines + 1)
        self.meeting.wait([f"read/{index}/{r}" for r in ranks], f"waiting for engines to read bucket {index}")


class IPCReceiver:
    """Reads the learner's memory directly."""

    def __init__(self, meeting: Meeting, rank: int, shared: SharedBuffer, device: torch.device) -> None:
        self.meeting, self.rank, self.device = meeting, rank, device
        self._memory: torch.Tensor | None = shared.open(device)

    def receive(self, index: int, count: int) -> torch.Tensor:
        assert self._memory is not None, "used after close"
        self.meeting.wait([f"full/{index}"], f"waiting for the learner to fill bucket {index}")
        return self._memory[:count]

    def release(self, index: int) -> None:
        _finish(self.device)
        self.meeting.put(f"read/{index}/{self.rank}")

    def close(self) -> None:
        self._memory = None


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ---------------------------------------------------------------------- broadcast


def open_group(backend: str, store: Any, address: str, rank: int, world: int, timeout_s: float) -> Any:
    """A process group of its own, apart from `torch.distributed`'s default group; blocks until all ranks came.

    Args:
        backend: "nccl" or "gloo".
        address: numeric address of this process on the network of the group, for gloo: it would look its own host's
            name up, which takes long where no name server answers, and finds the wrong network on hosts with several.

    Raises:
        WeightTransportError: it could not be formed.
    """
    from torch import distributed

    try:
        if backend == "gloo":
            gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
            gloo._timeout = timedelta(seconds=timeout_s)
            return distributed.ProcessGroupGloo(store, rank, world, gloo)
        options = distributed.ProcessGroupNCCL.Options()
        # Our own waits end first: NCCL's watchdog would end the process.
        options._timeout = timedelta(seconds=2 * timeout_s + 60)
        return distributed.ProcessGroupNCCL(store, rank, world, options)
    except (RuntimeError, AttributeError) as error:
        raise WeightTransportError(f"{backend} group of {world} processes: {error}") from error


class Broadcast:
    """Both ends of a broadcast from rank 0 over a process group."""

    def __init__(self, meeting: Meeting, group: Any, buffer: torch.Tensor) -> None:
        self.meeting, self.group, self.buffer = meeting, group, buffer

    def send(self, index: int, count: int) -> None:
        self._broadcast(index, count)

    def receive(self, index: int, count: int) -> torch.Tensor:
        self._broadcast(index, count)
        return self.buffer[:count]

    def release(self, index: int) -> None:
        """The next broadcast is ordered after the reads by the stream."""

    def close(self) -> None:
        """The group stays for the next push."""

    def _broadcast(self, index: int, count: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        try:
            work = self.group.broadcast([self.buffer[:count]], options)
            self.meeting.poll(work.is_completed, f"broadcast of bucket {index}")
            work.wait()
        except WeightTransportError:
            raise
        except RuntimeError as error:
            raise WeightTransportError(f"broadcast of bucket {index} failed: {error}") from error


def close_group(group: Any) -> None:
    """End a group, also while a collective hangs in it."""
    with contextlib.suppress(Exception):  # a group whose other members are dead may not end in order
        group.abort()
