"""vLLM on a GPU: CUDA graphs, sharing the GPU with a sleeping engine, CUDA IPC from unusual memory, NCCL."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from precision_policies import compare_attestations, load_policy
from rllib_llm.engines import EngineError, SamplingParams
from rllib_llm.engines.base import NO_WEIGHTS
from rllib_llm.process.attest import build_attestation
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.stream import WeightSender
from rllib_llm.sync.topology import choose_transport, place_of
from tests.vllm.cases import deltas, perturb, prompts, ragged_config, random_learner, start
from tests.vllm.test_transports import Push

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(n=3, max_tokens=24, seed=4, ignore_eos=True)
CACHE_BYTES = 8 << 30


@pytest.fixture(scope="module")
def sleeper(ray_for_engines: None) -> Iterator[tuple[Any, Any]]:
    """(learner, engine that may sleep, without CUDA graphs) with the learner's weights."""
    config = ragged_config("qwen3")
    model = random_learner(config, "unified-fp8")
    options = {"kv_cache_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.1, "cuda_graphs": False}
    with start(config, "unified-fp8", sleep_mode=True, **options) as engine:
        engine.update_weights(export_weights(model, 1))
        yield model, engine


def same(a: Any, b: Any) -> bool:
    pairs = [(x, y) for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True)]
    return all(
        np.array_equal(x.token_ids, y.token_ids) and np.array_equal(x.logprobs, y.logprobs) for x, y in pairs
    )


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_cuda_graphs_change_no_bit_and_are_attested(qwen3: tuple[Any, Any], sleeper: tuple[Any, Any]) -> None:
    """Decoding in graphs and without gives the same tokens and log-probs; each engine says which it runs, and with how
    many attention splits, from its own objects; both are the learner's operators."""
    model, graphs = qwen3
    _, eager = sleeper
    update = export_weights(model, 70)
    graphs.update_weights(update)
    eager.update_weights(update)
    asked = prompts(8)
    assert same(graphs.generate(asked, PARAMS), eager.generate(asked, PARAMS))
    with_graphs, without = graphs.attest(), eager.attest()
    assert with_graphs.informational["cuda_graphs"] == "FULL"
    assert without.informational["cuda_graphs"] == "NONE"
    for theirs in (with_graphs, without):
        assert theirs.informational["attention_splits"] == "[1]"
    ours = build_attestation("train", load_policy("unified-fp8"), model.plan, torch.device("cuda"))
    for theirs in (with_graphs, without):
        compare_attestations(load_policy("unified-fp8"), ours, theirs)
    bound = with_graphs.operators
    wrong = dataclasses.replace(
        with_graphs, operators={**bound, "attention": bound["attention"] + " + splits=(32,)"}
    )
    with pytest.raises(Exception, match="attention"):
        compare_attestations(load_policy("unified-fp8"), ours, wrong)


def test_prompts_that_join_a_long_answer_change_none_of_its_bits(ray_for_engines: None) -> None:
    """Beside a few short prompts FlashAttention would cut the keys of one long answer in parts: its log-probs are the
    learner's whether a step with prompts is one CUDA graph (up to 64 tokens here) or launched one by one."""
    config = ragged_config("qwen3")
    config.max_position_embeddings = 2048
    model = random_learner(config, "unified-fp8")
    options = {"max_num_seqs": 8, "graph_tokens": 64, "enable_prefix_caching": False}
    with start(config, "unified-fp8", **options) as engine:
        engine.update_weights(export_weights(model, 1))
        params = SamplingParams(max_tokens=700, seed=3, ignore_eos=True)
        asked = [prompts(1, count=2)[1] * 40]
        asked[0] = asked[0][:1200]
        [long] = engine.submit(asked, params)
        done, joined = {}, 0
        while long not in done:
            size = 150 if joined % 2 else 12
            short = engine.submit([[3 + (joined + i) % 180 for i in range(size)]] * 4, params)
            done |= engine.collect(0.03)
            engine.abort([request for request in short if request not in done])
            joined += 1
    assert joined > 3
    delta = deltas(model, asked, [done[long]], params)
    assert (len(delta), np.abs(delta).max()) == (700, 0)


def test_an_engine_that_sleeps_gives_its_memory_to_the_learner(sleeper: tuple[Any, Any]) -> None:
    """Level 1: the cache's memory is free and usable while the engine sleeps; weights, tokens and bits are as before
    after it wakes, and no prefix of before is served."""
    model, engine = sleeper
    engine.update_weights(export_weights(model, 2))
    asked = prompts(9)
    before, held = engine.generate(asked, PARAMS), dict(engine.attest().weights)
    for _ in range(3):  # another process may take memory between the two readings
        awake = free_bytes()
        engine.sleep(1)
        freed = free_bytes() - awake
        if freed > 0.9 * CACHE_BYTES:
            break
        engine.wake()
    assert freed > 0.9 * CACHE_BYTES
    learners = torch.full((CACHE_BYTES,), 255, dtype=torch.uint8, device="cuda")  # NaN, read as bf16 or e4m3
    for refused in (lambda: engine.generate(asked, PARAMS), engine.attest):
        with pytest.raises(EngineError, match="sleeps"):
            refused()
    del learners
    torch.cuda.empty_cache()
    engine.wake()
    assert dict(engine.attest().weights) == held
    assert same(engine.generate(asked, PARAMS), before)
    assert engine.weights_version == 2


def test_weights_dropped_at_level_2_come_back_with_an_update(sleeper: tuple[Any, Any]) -> None:
    """Level 2 keeps nothing on the host: the engine refuses to sample until an update, by any transport."""
    model, engine = sleeper
    engine.update_weights(export_weights(model, 3))
    asked = prompts(10)
    before = engine.generate(asked, PARAMS)
    for again, update in enumerate((lambda: engine.update_weights(export_weights(model, 4)),
                                    lambda: Push(model, engine)(export_manifest(model, 5)))):  # fmt: skip
        engine.sleep(2)
        saved = engine._actor.inspect(
            lambda worker: [
                n
                for n in worker.llm.llm_engine.model_executor.driver_worker.worker._sleep_saved_buffers
                if "scale_inv" in n or "proj" in n
            ]
        )
        assert saved == []
        engine.wake()
        assert engine.weights_version == NO_WEIGHTS
        with pytest.raises(EngineError, match="no weights yet"):
            engine.generate(asked, PARAMS)
        update()
        assert engine.weights_version == 4 + again
        assert same(engine.generate(asked, PARAMS), before)


def test_the_embedded_engine_gives_its_memory_back_too() -> None:
    """On a GPU the embedded engine's weights wait in host memory while it sleeps; the bits are as before."""
    from rllib_llm.engines import make_engine

    config = ragged_config("qwen3")
    model = random_learner(config, "unified-fp8")
    with make_engine("torch", config, "unified-fp8", device="cuda") as engine:
        engine.update_weights(export_weights(model, 1))
        asked = prompts(11, count=3)
        before = engine.generate(asked, PARAMS)
        assert np.abs(deltas(model, asked, before, PARAMS)).max() == 0
        allocated = torch.cuda.memory_allocated()
        engine.sleep(1)
        assert {b.device.type for b in engine._model.buffers()} == {"cpu"}
        assert torch.cuda.memory_allocated() < allocated
        engine.wake()
        assert same(engine.generate(asked, PARAMS), before)


def test_a_buffer_in_expandable_segments_can_be_shared(qwen3: tuple[Any, Any]) -> None:
    """The learner may run with expandable segments, whose memory CUDA shares by another kind of handle."""
    model, engine = qwen3
    push = Push(model, engine)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        push.sender = WeightSender(torch.device("cuda"), "127.0.0.1", 60.0, bucket_bytes=64 << 20)
        perturb(model)
        manifest = export_manifest(model, 80)
        receipt = push(manifest)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    assert dict(receipt.hashes) == dict(manifest.hashes)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_travel_between_gpus_by_nccl(ray_for_engines: None) -> None:
    """A learner on the second GPU, vLLM on the first: NCCL is chosen, receipts are right, and after a broken push a new
    group is formed."""
    config = ragged_config("qwen3")
    with torch.cuda.device(1), start(config, "unified-fp8", cuda_graphs=False) as engine:
        model = random_learner(config, "unified-fp8").to("cuda:1")
        transport, why = choose_transport(place_of("cuda:1"), engine.place)
        assert transport == "nccl", why
        push = Push(model, engine)
        push.transport, push.sender = (
            transport,
            WeightSender(torch.device("cuda:1"), "127.0.0.1", 60.0, 256 << 10),
        )
        for version in (1, 2, 3):
            perturb(model)
            manifest = export_manifest(model, version)
            receipt = push(manifest)
            assert (receipt.version, dict(receipt.hashes)) == (version, dict(manifest.hashes))
        with pytest.raises(Exception, match="damaged on the way"):
            push(dataclasses.replace(manifest, version=4, hashes=dict.fromkeys(manifest.hashes, "0" * 64)))
        assert engine.weights_version == 3
        receipt = push(dataclasses.replace(manifest, version=5))
        assert receipt.version == engine.weights_version == 5
        assert len(engine.generate(prompts(12, count=2), PARAMS)) == 2
