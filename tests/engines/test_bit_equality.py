"""The claim of the product on CPU: what the engine sampled with is what the learner's packed forward says."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from precision_policies import available
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.models import PackedBatch, load_pretrained, load_tokenizer, save_pretrained
from rllib_llm.sync.export import export_weights
from tests.engines.cases import engine_of
from tests.models.cases import CONFIGS, make_model, random_sequences

pytestmark = pytest.mark.slow

PROMPT_LENGTHS = (1, 3, 17, 64, 129, 5)
UNIFIED = ("unified-fp8", "bf16")


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_pair(kind: str, policy: str, seed: int = 0, **options):
    """(learner's model, engine with its weights)."""
    model = make_model(kind, policy, seed)
    return model, engine_of(model, **options)


def rescored(model, prompts, results, params: SamplingParams, order=None) -> np.ndarray:
    """The learner's log-probs of all sampled tokens, from one packed forward over all sequences, in engine order."""
    pairs = [(p, c) for p, row in zip(prompts, results, strict=True) for c in row]
    order = list(range(len(pairs))) if order is None else order
    batch = PackedBatch.from_sequences([list(pairs[i][0]) + pairs[i][1].token_ids.tolist() for i in order])
    rows, targets, banned = [], [], []
    for place, i in enumerate(order):
        start = int(batch.cu_seqlens[place]) + len(pairs[i][0]) - 1
        length = len(pairs[i][1].token_ids)
        rows.append(torch.arange(start, start + length))
        targets.append(torch.from_numpy(pairs[i][1].token_ids))
        banned.append(torch.arange(length) < params.min_tokens)
    with torch.no_grad():
        hidden = model(batch)[torch.cat(rows)]
        stop_ids = (2, *params.stop_token_ids) if params.min_tokens else ()
        logp = model.token_logprobs(
            hidden, torch.cat(targets), params.temperature, params.top_k, params.top_p,
            banned_ids=stop_ids, banned_rows=torch.cat(banned),
        )  # fmt: skip
    pieces = dict(zip(order, logp.split([len(t) for t in targets]), strict=True))
    return torch.cat([pieces[i] for i in range(len(pairs))]).numpy()


def sampled(results) -> np.ndarray:
    return np.concatenate([c.logprobs for row in results for c in row])


def assert_bit_equal(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype == np.float32
    different = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
    first = different[0] if len(different) else None
    assert first is None, (
        f"{len(different)} of {len(a)} log-probs differ, first at {first}: {a[first]!r} {b[first]!r}"
    )


@pytest.mark.parametrize("policy", UNIFIED)
@pytest.mark.parametrize("kind", CONFIGS)
def test_sampled_logprobs_are_the_learners_bits(kind, policy):
    """Every architecture, ragged dimensions, shared prefixes, uneven ends: Δ = 0 exactly."""
    model, engine = make_pair(kind, policy, max_num_seqs=7)
    prompts = random_sequences(PROMPT_LENGTHS, model.architecture.vocab)
    params = SamplingParams(n=3, max_tokens=24, seed=5, stop_token_ids=(7, 9, 11))
    results = engine.generate(prompts, params)
    ours = sampled(results)
    assert len({len(c.token_ids) for row in results for c in row}) > 2  # they did stop unevenly
    assert_bit_equal(ours, rescored(model, prompts, results, params))


@pytest.mark.parametrize("policy", available())
def test_a_policy_keeps_the_promise_of_exactly_on_policy(policy):
    """Every shipped policy that says `exactly_on_policy` has mismatch 0 here, and every one that does not has some."""
    model, engine = make_pair("llama3-rope-biases", policy)
    prompts = random_sequences((4, 20), model.architecture.vocab)
    params = SamplingParams(n=4, max_tokens=16, seed=1)
    results = engine.generate(prompts, params)
    ours, theirs = sampled(results), rescored(model, prompts, results, params)
    if model.policy.exactly_on_policy:
        assert_bit_equal(ours, theirs)
    else:
        assert not np.array_equal(ours, theirs)


@pytest.mark.parametrize("policy", UNIFIED)
def test_mismatch_is_zero_for_every_sampling_distribution(policy):
    """Temperature, top-k, top-p, a minimum length: the learner recomputes exactly the distribution sampled from."""
    model, engine = make_pair("qwen3", policy)
    prompts = random_sequences((4, 20), model.architecture.vocab)
    for sampling in (
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 12},
        {"top_p": 0.8},
        {"temperature": 0.6, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0},
        {"min_tokens": 10, "stop_token_ids": tuple(range(3, 60))},
    ):
        params = SamplingParams(n=4, max_tokens=16, seed=1, **sampling)
        results = engine.generate(prompts, params)
        assert_bit_equal(sampled(results), rescored(model, prompts, results, params))


@pytest.mark.parametrize("policy", UNIFIED)
def test_batch_composition_chunking_and_threads_change_no_bit(policy):
    """One sequence at a time or all at once, prefill in pieces of 10 tokens or whole, 1 or 2 threads, learner's batch
    packed in any order: the same tokens and the same log-prob bits."""
    model, engine = make_pair("llama", policy)
    prompts = random_sequences((1, 17, 129), model.architecture.vocab)
    params = SamplingParams(n=2, max_tokens=8, seed=3)
    expected = engine.generate(prompts, params)
    reference = sampled(expected)

    def same(results) -> None:
        for row, other in zip(expected, results, strict=True):
            for one, two in zip(row, other, strict=True):
                assert one.token_ids.tolist() == two.token_ids.tolist()
        assert_bit_equal(reference, sampled(results))

    for options in (
        {"max_num_seqs": 1},
        {"max_prefill_tokens": 10},
        {"max_num_seqs": 3, "max_prefill_tokens": 64},
    ):
        same(engine_of(model, **options).generate(prompts, params))
    for count in (1, 2):
        order = list(np.random.default_rng(count).permutation(len(prompts) * params.n))
        with threads(count):
            same(engine.generate(prompts, params))
            assert_bit_equal(reference, rescored(model, prompts, expected, params, order))


@pytest.mark.parametrize("policy", UNIFIED)
def test_narrow_and_wide_kv_storage_have_the_same_bits(policy, monkeypatch):
    """A cache in the compute dtype holds the same numbers as the float64 one of small models."""
    from rllib_llm.models import kv_cache

    model, engine = make_pair("qwen2", policy)
    prompts = random_sequences((9, 30), model.architecture.vocab)
    params = SamplingParams(n=2, max_tokens=10, seed=3)
    wide = engine.generate(prompts, params)
    assert engine._cache.dtype == torch.float64
    monkeypatch.setattr(kv_cache, "WIDE_STORAGE_BYTES", 0)
    narrow_engine = make_pair("qwen2", policy)[1]
    narrow = narrow_engine.generate(prompts, params)
    assert narrow_engine._cache.dtype == torch.bfloat16
    assert_bit_equal(sampled(wide), sampled(narrow))


@pytest.mark.parametrize("policy", UNIFIED)
def test_equality_survives_training(policy):
    """After each of three optimiser steps and syncs the mismatch is 0 again, and the policy has changed."""
    model, engine = make_pair("qwen3", policy)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    prompts = random_sequences((6, 33), model.architecture.vocab)
    params = SamplingParams(n=4, max_tokens=12, seed=9)
    previous = None
    for version in (2, 3, 4):
        results = engine.generate(prompts, params)
        assert_bit_equal(sampled(results), rescored(model, prompts, results, params))
        assert previous is None or not np.array_equal(sampled(results)[:4], previous)
        previous = sampled(results)[:4]
        batch = PackedBatch.from_sequences(
            [p + c.token_ids.tolist() for p, r in zip(prompts, results, strict=True) for c in r]
        )
        logp = model.token_logprobs(model(batch), torch.roll(batch.input_ids, -1))
        optimiser.zero_grad()
        (-logp.mean()).backward()
        optimiser.step()
        stale = rescored(model, prompts, results, params)
        assert not np.array_equal(stale, sampled(results))
        assert engine.update_weights(export_weights(model, version)).version == version
        assert {c.weights_version for r in engine.generate(prompts, params) for c in r} == {version}


def test_an_engine_that_loads_a_checkpoint_agrees_too(tmp_path):
    """Learner and engine that read the same directory, each for itself, agree before any sync."""
    path = save_pretrained(make_model("llama3-rope-biases", "unified-fp8"), tmp_path)
    model = load_pretrained(path, "unified-fp8")
    engine = make_engine("torch", path, "unified-fp8")
    prompts = random_sequences((5, 40), model.architecture.vocab)
    params = SamplingParams(n=2, max_tokens=10, seed=2)
    results = engine.generate(prompts, params)
    assert {c.weights_version for r in results for c in r} == {0}
    assert_bit_equal(sampled(results), rescored(model, prompts, results, params))


@pytest.mark.parametrize("policy", UNIFIED)
def test_the_shipped_model_with_its_tokenizer_and_a_stop_string(policy):
    """Trained weights, prompts as text, answers that end at "#d", both sides from one directory: exactly 0."""
    model, engine = load_pretrained("tiny-chain", policy), make_engine("torch", "tiny-chain", policy)
    tokenizer = load_tokenizer("tiny-chain")
    prompts = [tokenizer(text)["input_ids"] for text in ("3a+8b*2c-5=", "9a*9b-1c+4d+7=")]
    params = SamplingParams(n=8, max_tokens=40, seed=3, stop=("#7", "#1", "#3"))
    results = engine.generate(prompts, params)
    assert_bit_equal(sampled(results), rescored(model, prompts, results, params))
    texts = [tokenizer.decode(c.token_ids) for row in results for c in row]
    assert any(text.endswith(("#7", "#1", "#3")) for text in texts)
    for text in texts:
        assert not any(stop in text[:-1] for stop in ("#7", "#1", "#3")), text


@pytest.mark.parametrize("kind", CONFIGS)
def test_mixed_precision_is_measurably_off_policy(kind):
    """Under BF16 training and FP8 rollout the same comparison is far from 0: the test above can fail."""
    model, engine = make_pair(kind, "mixed-bf16-fp8")
    prompts = random_sequences((5, 40), model.architecture.vocab)
    params = SamplingParams(n=2, max_tokens=16, seed=5)
    results = engine.generate(prompts, params)
    difference = np.abs(sampled(results) - rescored(model, prompts, results, params))
    assert difference.mean() > 1e-3
    assert (difference == 0).mean() < 0.5


def test_quantising_the_masters_instead_of_their_bf16_values_would_be_seen():
    """Sending codes of the unrounded fp32 masters (xtuner#2044) changes the update's hashes after an optimiser step."""
    from precision_kernels import quantise_weight

    model = make_model("qwen3", "unified-fp8")
    update = export_weights(model, 1)
    name = "model.layers.0.mlp.up_proj.weight"
    master = model.get_parameter(name).detach()
    floor = model.policy.scale_floor
    sent = update.tensors[name].unpack().view(torch.uint8)
    assert torch.equal(quantise_weight(master.bfloat16(), "fp32", floor).codes.view(torch.uint8), sent)
    assert not torch.equal(quantise_weight(master, "fp32", floor).codes.view(torch.uint8), sent)
