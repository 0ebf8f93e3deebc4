"""Weights from the learner's process into vLLM's: through CUDA IPC on a GPU, by a broadcast over gloo on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from rllib_llm.engines import EngineError, SamplingParams
from rllib_llm.engines.base import NO_WEIGHTS
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.packed import WeightSyncError
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.sync.stream import WeightSender
from rllib_llm.sync.topology import WeightTransportError, choose_transport, place_of
from tests.vllm.cases import DEVICE, deltas, perturb, prompts

PARAMS = SamplingParams(n=2, max_tokens=8, seed=3, ignore_eos=True)


class Push:
    """One push: the learner sends in a thread of its own while the engine takes it."""

    def __init__(self, model: Any, engine: Any) -> None:
        self.model, self.engine = model, engine
        here = place_of(next(model.parameters()).device)
        self.transport = choose_transport(here, engine.place, "auto" if DEVICE == "cuda" else "gloo")[0]
        self.sender = WeightSender(torch.device(DEVICE), "127.0.0.1", 60.0, bucket_bytes=256 << 10)

    def __call__(self, manifest: Any, source: Any = None) -> Any:
        [offer] = self.sender.offer(manifest, self.transport, [self.engine.place.identity])
        self.error: Exception | None = None

        def send() -> None:
            try:
                self.sender.send(offer.push, source or self.model.rollout_tensors)
            except WeightTransportError as error:
                self.error = error

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return self.engine.update_weights(offer)
        finally:
            thread.join(600)
            assert not thread.is_alive(), "the learner still waits"


def test_streamed_updates_leave_the_learners_bits(qwen3: tuple[Any, Any]) -> None:
    """Three updates through a 256 kB buffer: receipts as announced, answers of the new weights, no stale prefix."""
    model, engine = qwen3
    push, asked = Push(model, engine), prompts(5, count=3)
    assert push.transport == ("cuda_ipc" if DEVICE == "cuda" else "gloo")
    for version in (31, 32, 33):
        perturb(model)
        manifest = export_manifest(model, version)
        receipt = push(manifest)
        assert (receipt.version, dict(receipt.hashes)) == (version, dict(manifest.hashes))
        assert dict(manifest.hashes) == dict(export_weights(model, version).hashes)
        answers = engine.generate(asked, PARAMS)
        assert np.abs(deltas(model, asked, answers, PARAMS)).max() == 0
        assert answers[0][0].weights_version == version


def test_a_refused_stream_changes_nothing_and_a_torn_one_leaves_no_weights(qwen3: tuple[Any, Any]) -> None:
    """Wrong bytes are refused before they are applied; bytes that change after they were verified end sampling."""
    model, engine = qwen3
    push, asked = Push(model, engine), prompts(6, count=2)
    push(export_manifest(model, 41))
    before = engine.generate(asked, PARAMS)
    good = export_manifest(model, 42)
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(WeightSyncError, match=r"k_proj.weight: bytes hash to .* damaged on the way"):
        push(dataclasses.replace(good, hashes={**good.hashes, name: "0" * 64}))
    assert push.error is not None
    after = engine.generate(asked, PARAMS)
    assert engine.weights_version == 41
    assert all(np.array_equal(a[0].logprobs, b[0].logprobs) for a, b in zip(before, after, strict=True))

    readings: list[int] = []

    def torn() -> Any:
        readings.append(1)
        if len(readings) == 2:
            perturb(model)
        return model.rollout_tensors()

    with pytest.raises(EngineError, match="other bytes than it verified"):
        push(good, torn)
    assert engine.weights_version == NO_WEIGHTS
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(asked, PARAMS)
    push(export_manifest(model, 43))
    assert np.abs(deltas(model, asked, engine.generate(asked, PARAMS), PARAMS)).max() == 0


def test_tensors_of_this_process_are_refused(qwen3: tuple[Any, Any]) -> None:
    """vLLM runs in another process: what only exists in this one is not sent by accident."""
    model, engine = qwen3
    with pytest.raises(TypeError, match="cannot leave this process"):
        engine.update_weights(InProcessUpdate(export_manifest(model, 50), model.rollout_tensors))
