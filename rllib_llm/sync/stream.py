"""A push through buckets: the learner's `WeightSender`, and what an engine makes of its offer (`StreamIncoming`).

    learner                                    every engine
    offer: manifest, where to meet     ──▶     manifest fits?          ── "ready"
    all ready ─ first reading, bucket by bucket ─▶ hashes fit?         ── "verified"
    all verified ─ second reading, bucket by bucket ─▶ copied in place ── "held"

An engine that refuses, dies or is silent beyond the timeout ends the push for all, before anything is applied unless it
happens in the second reading.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore

from precision_kernels.reference.digest import flat_bytes
from rllib_llm.sync.channels import (
    Broadcast,
    IPCReceiver,
    IPCSender,
    ReceivingEnd,
    SendingEnd,
    SharedBuffer,
    close_group,
    open_group,
)
from rllib_llm.sync.layout import ALIGN, Piece, buckets, nbytes, used
from rllib_llm.sync.receiver import Batch, Incoming
from rllib_llm.sync.rendezvous import Meeting, connect, own_address, serve
from rllib_llm.sync.topology import STREAMED, Transport, WeightTransportError
from rllib_llm.sync.verify import WeightManifest
from rllib_llm.weights.format import dtype_name

__all__ = ["BUCKET_BYTES", "Groups", "StreamIncoming", "StreamOffer", "WeightSender", "give_up"]

logger = logging.getLogger(__name__)
BUCKET_BYTES = 256 << 20
"""Size of the buffer through which weights flow; smaller when the weights are."""
Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class StreamOffer:
    """What one engine needs to take part in one push; plain data.

    Attributes:
        push: id of the push.
        rank, engines: this engine is number `rank` of `engines`, from 1.
        group: id of the process group, for a broadcast; engines keep it for the next push.
        host, port: of the learner's store.
        shared: the learner's buffer, for cuda_ipc.
    """

    manifest: WeightManifest
    transport: Transport
    push: str
    rank: int
    engines: int
    group: str
    host: str
    port: int
    bucket_bytes: int
    timeout_s: float
    shared: SharedBuffer | None = None


class Groups:
    """What one process keeps from push to push: its connection to the learner's store, and one group for broadcasts."""

    def __init__(self) -> None:
        self._name, self._group = "", None
        self._address, self._store = ("", 0), None

    def connect(self, offer: StreamOffer) -> Any:
        """A client of the offer's store.

        Raises:
            WeightTransportError: it cannot be reached.
        """
        if self._store is None or self._address != (offer.host, offer.port):
            try:
                self._store = connect(offer.host, offer.port, offer.timeout_s)
            except RuntimeError as error:
                raise WeightTransportError(
                    f"the learner's store at {offer.host}:{offer.port} cannot be reached: {error}"
                ) from error
            self._address = (offer.host, offer.port)
        return self._store

    def get(self, offer: StreamOffer, store: Any, rank: int) -> Any:
        """The group of the offer, formed if it is not the one of the last push."""
        if self._name != offer.group:
            self.close()
            prefixed = PrefixStore(f"group/{offer.group}", store)
            address = own_address(offer.host, offer.port)
            self._group = open_group(
                offer.transport, prefixed, address, rank, offer.engines + 1, offer.timeout_s
            )
            self._name = offer.group
        return self._group

    def close(self) -> None:
        """End the group, and the connection, which may be what broke."""
        if self._group is not None:
            close_group(self._group)
        self._name, self._group, self._store = "", None, None


def give_up(offer: StreamOffer, why: str) -> None:
    """End a push from outside, for a caller that knows that an engine will not answer."""
    store = connect(offer.host, offer.port, offer.timeout_s)
    Meeting(store, offer.push, offer.engines, offer.timeout_s).stop(why)


class WeightSender:
    """The learner's side; one per learner.

    Args:
        device: where the learner's weights are.
        host: name or address under which the engines' nodes reach this one.
        bucket_bytes: extra memory of a push, on each side that needs a buffer.
        timeout_s: longest wait for one step of the other side.
    """

    def __init__(
        self, device: torch.device, host: str, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.device, self.host, self.timeout_s, self.bucket_bytes = device, host, timeout_s, bucket_bytes
        self._store: Any = None
        self._offers: dict[str, StreamOffer] = {}
        self._groups = Groups()
        self._group_of: tuple[str, ...] = ()
        self._group_name = ""
        self._buffers: dict[str, torch.Tensor] = {}

    def offer(
        self, manifest: WeightManifest, transport: Transport, engines: Sequence[str]
    ) -> list[StreamOffer]:
        """Begin a push to engines with these identities (`rllib_llm.sync.topology.Place.identity`).

        Returns:
            One offer per engine; all of one push, whose bytes `send` delivers.
        """
        if transport not in STREAMED:
            raise ValueError(f"transport {transport!r} is not streamed; {', '.join(STREAMED)} are")
        if self._store is None:
            self._store = serve(self.host, self.timeout_s)
        if self._group_of != (transport, *engines):
            self._group_of, self._group_name = (transport, *engines), uuid.uuid4().hex
        push = uuid.uuid4().hex
        buffer = self._buffer(manifest, transport)
        offers = [
            StreamOffer(
                manifest,
                transport,
                push,
                rank,
                len(engines),
                self._group_name,
                self.host,
                self._store.port,
                buffer.numel(),
                self.timeout_s,
                SharedBuffer.share(buffer) if transport == "cuda_ipc" else None,
            )
            for rank in range(1, len(engines) + 1)
        ]
        self._offers[push] = offers[0]
        return offers

    def send(self, push: str, source: Source) -> None:
        """Deliver the bytes of an offered push; returns when every engine holds them.

        Args:
            source: yields the manifest's tensors in its order, the same bits each time; it is read twice.

        Raises:
            WeightTransportError: an engine refused, broke off or did not answer; the push is over for all.
        """
        offer = self._offers.pop(push)
        meeting = Meeting(self._store, push, offer.engines, offer.timeout_s)
        try:
            meeting.gather("ready")
            plan = buckets(offer.manifest.specs, offer.bucket_bytes)
            # A thread has its own current device, and the kernels of `source` run on the current one.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                channel = self._channel(offer, meeting)
                for reading, phase in enumerate(("verified", "held")):
                    self._read(channel, offer, plan, source, reading * len(plan))
                    meeting.gather(phase)
            meeting.forget()
        except BaseException as error:
            self._groups.close()
            self._group_of = ()
            meeting.stop(f"the learner: {error}")
            raise

    def close(self) -> None:
        """Give buffers, group and store back."""
        self._groups.close()
        self._buffers.clear()
        self._store = None

    def _channel(self, offer: StreamOffer, meeting: Meeting) -> SendingEnd:
        buffer = self._buffer(offer.manifest, offer.transport)
        if offer.transport == "cuda_ipc":
            return IPCSender(meeting, self.device)
        return Broadcast(meeting, self._groups.get(offer, self._store, 0), buffer)

    def _buffer(self, manifest: WeightManifest, transport: Transport) -> torch.Tensor:
        """uint8, on the GPU except for gloo; kept, since engines have it open."""
        where = "cpu" if transport == "gloo" else str(self.device)
        total = sum(-(-nbytes(s) // ALIGN) * ALIGN for s in manifest.specs.values())
        size = max(ALIGN, min(self.bucket_bytes, total))
        if where not in self._buffers or self._buffers[where].numel() != size:
            self._buffers[where] = torch.empty(size, dtype=torch.uint8, device=where)
        return self._buffers[where]

    def _read(
        self, channel: SendingEnd, offer: StreamOffer, plan: list[list[Piece]], source: Source, first: int
    ) -> None:
        buffer = self._buffer(offer.manifest, offer.transport)
        tensors = iter(source())
        name, data = "", buffer
        for index, pieces in enumerate(plan, first):
            for piece in pieces:
                while name != piece.name:
                    name, tensor = next(tensors, ("", buffer))
                    _check_source(name, tensor, piece.name, offer.manifest)
                    data = flat_bytes(tensor)
                size = piece.stop - piece.start
                buffer[piece.at : piece.at + size].copy_(data[piece.start : piece.stop])
            channel.send(index, used(pieces))


def _check_source(name: str, tensor: torch.Tensor, wanted: str, manifest: WeightManifest) -> None:
    spec = manifest.specs.get(name)
    if spec is None or (dtype_name(tensor.dtype), tuple(tensor.shape)) != (spec.dtype, spec.shape):
        raise WeightTransportError(
            f"the learner's weights are not those of the manifest: {name or 'nothing'} came, in which {wanted} "
            "was expected; were they changed during the push?"
        )


class StreamIncoming(Incoming):
    """An offer, taken up by the engine that it was made to.

    Args:
        device: of the engine's weights.
        groups: of the engine's process, kept from push to push.

    Raises:
        WeightTransportError: the learner cannot be reached.
    """

    def __init__(self, offer: StreamOffer, device: torch.device, groups: Groups) -> None:
        self.offer, self.manifest, self.device, self.groups = offer, offer.manifest, device, groups
        self._store = groups.connect(offer)
        self.meeting = Meeting(self._store, offer.push, offer.engines, offer.timeout_s)
        self._phase, self._sent = "ready", 0
        self._channel: ReceivingEnd | None = None

    def agree(self, phase: str) -> None:
        self._phase = {"ready": "verified", "verified": "held"}[phase]
        self.meeting.report(phase, self.offer.rank)

    def refuse(self, why: str) -> None:
        try:
            self.meeting.refuse(self._phase, self.offer.rank, why)
            self.meeting.stop(f"engine {self.offer.rank} of {self.offer.engines}: {why}")
        except RuntimeError:  # the learner is gone: nobody is left to be told
            logger.warning("the learner's store is gone; it could not be told: %s", why)
        self.groups.close()

    def finished(self) -> None:
        self.meeting.put(f"held/{self.offer.rank}")

    def batches(self) -> Iterator[Batch]:
        channel = self._open()
        for pieces in buckets(self.manifest.specs, self.offer.bucket_bytes):
            data = channel.receive(self._sent, used(pieces))
            yield [(p.name, p.start, data[p.at : p.at + p.stop - p.start]) for p in pieces]
            channel.release(self._sent)
            self._sent += 1

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _open(self) -> ReceivingEnd:
        if self._channel is None:
            offer = self.offer
            if offer.transport == "cuda_ipc":
                assert offer.shared is not None
                self._channel = IPCReceiver(self.meeting, offer.rank, offer.shared, self.device)
            else:
                where = "cpu" if offer.transport == "gloo" else self.device
                buffer = torch.empty(offer.bucket_bytes, dtype=torch.uint8, device=where)
                self._channel = Broadcast(
                    self.meeting, self.groups.get(offer, self._store, offer.rank), buffer
                )
        return self._channel
