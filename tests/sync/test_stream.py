"""Weights through buckets: the same refusals as in host memory, bounded memory, and nothing that hangs.

Learner and engines are threads here. A broadcast runs over gloo, which is the code path of NCCL; CUDA IPC's hand-shake
runs on a buffer that is "opened" by handing it over (its CUDA part: tests/vllm/test_gpu.py).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.engines.base import NO_WEIGHTS
from rllib_llm.errors import EngineError
from rllib_llm.sync import channels
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.layout import ALIGN, buckets, nbytes, used
from rllib_llm.sync.packed import WeightSyncError
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.sync.rendezvous import Meeting, connect, serve
from rllib_llm.sync.stream import StreamOffer, WeightSender, give_up
from rllib_llm.sync.topology import WeightTransportError
from rllib_llm.sync.verify import WeightManifest
from rllib_llm.weights.format import TensorSpec, hash_tensors
from tests.models.cases import make_model

pytestmark = pytest.mark.slow

TRANSPORTS = ("gloo", "cuda_ipc")
PARAMS = SamplingParams(n=2, max_tokens=6, seed=1)
PROMPTS = [[5, 6, 7], [8]]


class Handed:
    """In place of a CUDA handle: the buffer itself."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer

    def open(self, device: torch.device) -> torch.Tensor:
        return self.buffer


@pytest.fixture
def learner() -> Any:
    return make_model("qwen3", "unified-fp8", seed=9)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightSender]:
    monkeypatch.setattr(channels.SharedBuffer, "share", staticmethod(Handed))
    made = WeightSender(torch.device("cpu"), "127.0.0.1", 600.0, bucket_bytes=40 * ALIGN)
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    """Two engines with other weights than the learner's, version 4."""
    old = make_model("qwen3", "unified-fp8", seed=0)
    made = [make_engine("torch", old.config, old.policy) for _ in range(2)]
    for engine in made:
        engine.update_weights(export_weights(old, 4))
    yield made
    for engine in made:
        engine.close()


class InThread(threading.Thread):
    """A call whose result or error is kept."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.value, self.error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(600)
        assert not self.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        return self.value


def push(
    sender: WeightSender, offers: list[StreamOffer], engines: list[Any], source: Callable[[], Any]
) -> tuple[InThread, list[InThread]]:
    """Send and receive at the same time; all have ended."""
    threads = [InThread(lambda e=e, o=o: e.update_weights(o)) for e, o in zip(engines, offers, strict=True)]
    sending = InThread(lambda: sender.send(offers[0].push, source))
    for thread in [sending, *threads]:
        thread.join(600)
        assert not thread.is_alive(), "a push must end"
    return sending, threads


def outputs(engine: Any) -> list[Any]:
    rows = engine.generate(PROMPTS, PARAMS)
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.weights_version) for row in rows for c in row]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_gets_the_bytes_that_the_learner_has(
    sender: WeightSender, engines: list[Any], learner: Any, transport: Any
) -> None:
    """Three pushes to two engines through 10 kB: receipts and answers are those of an update in host memory."""
    reference = make_engine("torch", learner.config, learner.policy)
    for version in (5, 6, 7):
        with torch.no_grad():
            learner.model.layers[0].mlp.up_proj.weight.mul_(1.25)
        update = export_weights(learner, version)
        manifest = export_manifest(learner, version)
        assert dict(manifest.hashes) == dict(update.hashes)
        assert list(manifest.specs) == list(update.tensors)
        offers = sender.offer(manifest, transport, ["one", "two"])
        assert offers[0].bucket_bytes < max(nbytes(s) for s in manifest.specs.values()) < update.nbytes
        sending, receiving = push(sender, offers, engines, learner.rollout_tensors)
        sending.result()
        reference.update_weights(update)
        for engine, thread in zip(engines, receiving, strict=True):
            receipt = thread.result()
            assert (receipt.version, dict(receipt.hashes)) == (version, dict(update.hashes))
            assert outputs(engine) == outputs(reference)


def lost(m: WeightManifest, name: str) -> WeightManifest:
    keep = {n: s for n, s in m.specs.items() if n != name}
    return dataclasses.replace(m, specs=keep, hashes={n: m.hashes[n] for n in keep})


def recast(m: WeightManifest, name: str) -> WeightManifest:
    spec = TensorSpec("float32", (3,))
    return dataclasses.replace(m, specs={**m.specs, name: spec})


def other_hash(m: WeightManifest, name: str) -> WeightManifest:
    return dataclasses.replace(m, hashes={**m.hashes, name: "0" * 64})


K = "model.layers.1.self_attn.k_proj.weight"
DAMAGE = {
    "shard missing": (lambda m: lost(m, K), "k_proj.weight: missing (while"),
    "dtype and shape": (lambda m: recast(m, "model.norm.weight"), "norm.weight: dtype float32"),
    "bytes": (lambda m: other_hash(m, K), "damaged on the way"),
    "policy": (lambda m: dataclasses.replace(m, policy_fingerprint="0" * 64), "policy fingerprint"),
    "plan": (lambda m: dataclasses.replace(m, plan_hash="0" * 64), "plan hash"),
}


@pytest.mark.parametrize("transport", [*TRANSPORTS, "in_process"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_refused_push_changes_no_engine(
    sender: WeightSender, engines: list[Any], learner: Any, transport: Any, name: str
) -> None:
    """Whatever one engine refuses, none applies anything; all go on with what they held, and the next push works."""
    damage, message = DAMAGE[name]
    good = export_manifest(learner, 5)
    before = [outputs(e) for e in engines]
    if transport == "in_process":
        errors = []
        for engine in engines:
            with pytest.raises(WeightSyncError) as caught:
                engine.update_weights(InProcessUpdate(damage(good), learner.rollout_tensors))
            errors.append(str(caught.value))
    else:
        offers = sender.offer(good, transport, ["one", "two"])
        offers[1] = dataclasses.replace(offers[1], manifest=damage(good))
        sending, receiving = push(sender, offers, engines, learner.rollout_tensors)
        assert isinstance(sending.error, WeightTransportError)
        errors = [str(r.error) for r in receiving]
        assert all(isinstance(r.error, WeightSyncError) for r in receiving)
    assert message in errors[1]
    assert [e.weights_version for e in engines] == [4, 4]
    assert [outputs(e) for e in engines] == before
    if transport != "in_process":
        offers = sender.offer(good, transport, ["one", "two"])
        sending, receiving = push(sender, offers, engines, learner.rollout_tensors)
        sending.result()
    else:
        for engine in engines:
            engine.update_weights(InProcessUpdate(good, learner.rollout_tensors))
    assert [e.weights_version for e in engines] == [5, 5]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_that_change_during_a_push_are_not_sampled_from(
    sender: WeightSender, engines: list[Any], learner: Any, transport: Any
) -> None:
    """Other bytes in the second reading than in the verified first: the engines hold no weights until the next push."""
    readings = []

    def source() -> Any:
        readings.append(1)
        if len(readings) == 2:
            learner.model.norm.weight.data.add_(1.0)
        return learner.rollout_tensors()

    offers = sender.offer(export_manifest(learner, 5), transport, ["one", "two"])
    sending, receiving = push(sender, offers, engines, source)
    assert isinstance(sending.error, WeightTransportError)
    for engine, thread in zip(engines, receiving, strict=True):
        assert isinstance(thread.error, EngineError)
        assert engine.weights_version == NO_WEIGHTS
        with pytest.raises(EngineError, match="no weights yet"):
            engine.generate(PROMPTS, PARAMS)
    offers = sender.offer(export_manifest(learner, 6), transport, ["one", "two"])
    push(sender, offers, engines, learner.rollout_tensors)[0].result()
    assert [e.weights_version for e in engines] == [6, 6]


def test_a_source_with_other_tensors_than_announced_is_an_error(
    sender: WeightSender, engines: list[Any], learner: Any
) -> None:
    """A learner whose tensors do not follow its own manifest stops the push; the engines keep their weights."""
    offers = sender.offer(export_manifest(learner, 5), "cuda_ipc", ["one", "two"])
    sending, receiving = push(sender, offers, engines, lambda: reversed(list(learner.rollout_tensors())))
    with pytest.raises(WeightTransportError, match="not those of the manifest"):
        sending.result()
    assert all(isinstance(r.error, WeightSyncError) for r in receiving)
    assert [e.weights_version for e in engines] == [4, 4]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_never_comes_ends_the_push(
    monkeypatch: pytest.MonkeyPatch, engines: list[Any], learner: Any, transport: Any
) -> None:
    """Learner and engine wait their timeout, name the engine that is missing, whoever of them is the first to lose
    patience, and the engine that came keeps its weights."""
    monkeypatch.setattr(channels.SharedBuffer, "share", staticmethod(Handed))
    sender = WeightSender(torch.device("cpu"), "127.0.0.1", 10.0)
    offers = sender.offer(export_manifest(learner, 5), transport, ["one", "two"])
    receiving = InThread(lambda: engines[0].update_weights(offers[0]))
    missing = "waiting for engine 2 of 2 to report 'ready': nothing came within 10 s"
    with pytest.raises(WeightTransportError, match=missing):
        sender.send(offers[0].push, learner.rollout_tensors)
    receiving.join(600)
    assert not receiving.is_alive()
    assert isinstance(receiving.error, WeightSyncError)
    assert missing in str(receiving.error)
    assert engines[0].weights_version == 4
    sender.close()


def test_a_learner_that_is_gone_is_an_error_of_the_transport() -> None:
    """Whatever an engine asks the learner's store when that has ended, it hears why, in its own kind of error."""
    server = serve("127.0.0.1", 600.0)
    meeting = Meeting(connect("127.0.0.1", server.port, 600.0), "push", 2, 600.0)
    meeting.check_stopped()
    del server
    calls: list[Callable[[], Any]] = [
        lambda: meeting.poll(lambda: False, "broadcast"),
        meeting.check_stopped,
        lambda: meeting.report("ready", 1),
        lambda: meeting.stop("why"),
        lambda: meeting.wait(["key"], "waiting"),
    ]
    for call in calls:
        with pytest.raises(WeightTransportError, match="the learner's store is gone"):
            call()


def test_a_push_can_be_given_up_from_outside(sender: WeightSender, engines: list[Any], learner: Any) -> None:
    """A driver that knows that an engine died ends the wait of all others at once, with its reason."""
    offers = sender.offer(export_manifest(learner, 5), "gloo", ["one", "two"])
    sending = InThread(lambda: sender.send(offers[0].push, learner.rollout_tensors))
    receiving = InThread(lambda: engines[0].update_weights(offers[0]))
    give_up(offers[1], "env runner 2 died")
    with pytest.raises(WeightTransportError, match="env runner 2 died"):
        sending.result()
    with pytest.raises(WeightSyncError, match="env runner 2 died"):
        receiving.result()


@pytest.mark.parametrize("size", [ALIGN, 3 * ALIGN, 1 << 20])
def test_buckets_hold_every_byte_once_and_aligned(size: int) -> None:
    """Pieces cover every tensor without gap or overlap, begin at whole words, and no bucket is larger than asked."""
    specs = {
        "a": TensorSpec("float8_e4m3fn", (130, 7)),
        "empty": TensorSpec("float32", (0, 4)),
        "b": TensorSpec("float32", (1,)),
        "c": TensorSpec("bfloat16", (3, 333)),
    }
    plan = buckets(specs, size)
    covered = dict.fromkeys(specs, 0)
    for pieces in plan:
        end = 0
        for piece in pieces:
            assert (piece.at % ALIGN, piece.start % 8) == (0, 0)
            assert piece.at >= end
            assert covered[piece.name] == piece.start
            covered[piece.name] = piece.stop
            end = piece.at + piece.stop - piece.start
        assert used(pieces) == end <= size
    assert covered == {name: nbytes(spec) for name, spec in specs.items()}
    for wrong in (0, ALIGN - 1, ALIGN + 8):
        with pytest.raises(ValueError, match="multiple of 256"):
            buckets(specs, wrong)


@pytest.mark.parametrize("reading", [1, 2])
def test_a_tensor_that_was_not_announced_ends_an_update_in_process(
    engines: list[Any], learner: Any, reading: int
) -> None:
    """In the first reading the engine keeps its weights, in the second it has none; both are errors of an update."""
    readings = []

    def source() -> Any:
        readings.append(1)
        more = {"model.extra.weight": torch.zeros(3)} if len(readings) == reading else {}
        return [*learner.rollout_tensors(), *more.items()]

    kind = WeightSyncError if reading == 1 else EngineError
    with pytest.raises(kind, match=r"model\.extra\.weight: not in the manifest"):
        engines[0].update_weights(InProcessUpdate(export_manifest(learner, 5), source))
    assert engines[0].weights_version == (4 if reading == 1 else NO_WEIGHTS)


def test_an_engine_in_the_learners_process_hashes_what_it_holds(engines: list[Any], learner: Any) -> None:
    """No host copy: the tensors themselves are read, and the receipt is of the engine's own memory."""
    manifest = export_manifest(learner, 5)
    receipt = engines[0].update_weights(InProcessUpdate(manifest, learner.rollout_tensors))
    assert dict(receipt.hashes) == dict(manifest.hashes) == hash_tensors(dict(learner.rollout_tensors()))
