"""What the embedded engine samples, how it uses its memory, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from precision_policies import load_policy
from rllib_llm.engines import EngineError, PromptError, SamplingParams, SamplingParamsError, make_engine
from rllib_llm.sync.export import export_weights
from tests.engines.cases import VOCAB, engine_of, ids_of
from tests.models.cases import CONFIGS, make_model, random_sequences

pytestmark = pytest.mark.slow


def test_shapes_dtypes_and_lengths(engine):
    """n completions per prompt, int64 ids, float32 log-probs <= 0 of the same length, "length" at max_tokens."""
    prompts = random_sequences((1, 9, 4), VOCAB)
    results = engine.generate(prompts, SamplingParams(n=5, max_tokens=7, seed=0, ignore_eos=True))
    assert [len(row) for row in results] == [5, 5, 5]
    for completion in (c for row in results for c in row):
        assert completion.token_ids.dtype == np.int64
        assert completion.logprobs.dtype == np.float32
        assert len(completion.token_ids) == len(completion.logprobs) == 7
        assert (completion.logprobs <= 0).all()
        assert completion.finish_reason == "length"
        assert completion.weights_version == 1


def test_group_members_differ_and_seeds_repeat(engine):
    """The n completions of a prompt differ; the same seed repeats all of them, another seed none; no seed is fresh."""
    prompts = random_sequences((6, 6), VOCAB)

    def run(seed):
        return ids_of(
            engine.generate(prompts, SamplingParams(n=8, max_tokens=12, seed=seed, ignore_eos=True))
        )

    first = run(1)
    for row in first:
        assert len({tuple(ids) for ids in row}) == 8
    assert run(1) == first
    assert run(2) != first
    assert run(None) != run(None)


def test_tokens_do_not_depend_on_company_or_on_n(engine):
    """With per-prompt seeds a prompt gives the same completions alone, in company, in another place, and its first
    completion is the same for n = 1 and n = 6."""
    prompts = random_sequences((3, 30, 11, 60), VOCAB)
    params = SamplingParams(n=3, max_tokens=10, seed=None)
    together = ids_of(engine.generate(prompts, params, seeds=[10, 11, 12, 13]))
    backwards = ids_of(engine.generate(prompts[::-1], params, seeds=[13, 12, 11, 10]))
    assert backwards[::-1] == together
    for n in (1, 6):
        alone = ids_of(engine.generate(prompts[1:2], SamplingParams(n=n, max_tokens=10), seeds=[11]))
        assert alone[0][:1] == together[1][:1]


def test_batch_seed_names_the_stream_by_place(engine):
    """`seed` with the prompt's index is the stream: appending prompts changes nothing for those before."""
    prompts = random_sequences((3, 30, 11), VOCAB)
    params = SamplingParams(n=2, max_tokens=8, seed=4)
    assert ids_of(engine.generate(prompts, params))[:2] == ids_of(engine.generate(prompts[:2], params))


def test_longer_runs_continue_shorter_ones(engine):
    """max_tokens only cuts: the first tokens are the same for 5 and for 20."""
    prompts = random_sequences((5,), VOCAB)
    runs = [
        ids_of(engine.generate(prompts, SamplingParams(n=2, max_tokens=m, seed=3, ignore_eos=True)))
        for m in (5, 20)
    ]
    assert [ids[:5] for ids in runs[1][0]] == runs[0][0]


def test_greedy_equals_sampling_from_a_cold_distribution(engine):
    """Temperature 0 takes the argmax at every step, for all n, without regard to the seed."""
    prompts = random_sequences((5, 8), VOCAB)
    greedy = [
        ids_of(engine.generate(prompts, SamplingParams(n=2, temperature=0.0, max_tokens=9, seed=s)))
        for s in (1, 2)
    ]
    cold = ids_of(engine.generate(prompts, SamplingParams(n=2, temperature=1e-3, max_tokens=9, seed=3)))
    assert greedy[0] == greedy[1] == cold
    assert greedy[0][0][0] == greedy[0][0][1]


def test_top_k_one_is_greedy_with_logprob_zero(engine):
    """A distribution with one possible token has log-prob exactly 0."""
    prompts = random_sequences((5,), VOCAB)
    only = engine.generate(prompts, SamplingParams(top_k=1, max_tokens=9, seed=1))
    greedy = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9))
    assert ids_of(only) == ids_of(greedy)
    assert (only[0][0].logprobs == 0).all()


def test_unusable_prompts_are_all_listed(model):
    """Empty, too long and out-of-vocabulary prompts are named together, and nothing is generated."""
    engine = engine_of(model, max_model_len=20)
    with pytest.raises(PromptError) as caught:
        engine.generate([[5], [], [5] * 20, [5, 128], [-1]], SamplingParams())
    message = str(caught.value)
    for part in (
        "prompt 1 is empty",
        "prompt 2 has 20 tokens",
        "prompt 3 holds ids in [5, 128]",
        "prompt 4 holds",
    ):
        assert part in message
    assert "prompt 0" not in message


def test_prompts_are_prefilled_once_and_finished_sequences_leave(model, monkeypatch):
    """Tokens through the model: each prompt once, whatever n is, and each answer's tokens but its last: no padding, no
    step for a sequence that has ended."""
    engine = engine_of(model, max_num_seqs=6)
    through = []
    real = type(engine.model).forward
    monkeypatch.setattr(
        type(engine.model),
        "forward",
        lambda self, b, c=None: (through.append(len(b.input_ids)), real(self, b, c))[1],
    )
    prompts = random_sequences((3, 40, 11), VOCAB)
    results = engine.generate(
        prompts, SamplingParams(n=5, max_tokens=20, seed=0, stop_token_ids=tuple(range(3, 20)))
    )
    answers = [len(c.token_ids) for row in results for c in row]
    assert len(set(answers)) > 3
    assert sum(through) == sum(map(len, prompts)) + sum(answers) - len(answers)


def test_no_prompts_give_no_results(engine):
    """An empty list of prompts is not an error."""
    assert engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_seqs": 5, "kv_cache_bytes": 200_000}])
def test_many_more_sequences_than_slots(model, engine, options):
    """Sequences wait for slots and for KV memory; results are those of a large engine."""
    prompts = random_sequences((3, 9, 2, 14, 30, 1, 1, 6), VOCAB)
    params = SamplingParams(n=5, max_tokens=9, seed=8, stop_token_ids=tuple(range(3, 30)))
    small = engine_of(model, **options)
    assert ids_of(small.generate(prompts, params)) == ids_of(engine.generate(prompts, params))


def test_kv_memory_is_bounded_and_too_little_is_an_error(model):
    """The cache stays within kv_cache_bytes; a budget for less than two sequences is refused with the number needed."""
    params = SamplingParams(n=64, max_tokens=40, seed=0)
    engine = engine_of(model, kv_cache_bytes=3_000_000)
    engine.generate(random_sequences((5,) * 4, VOCAB), params)
    held = sum(t.numel() * t.element_size() for c in engine._cache.layers for t in (c.k, c.u, c.e))
    assert 1_000_000 < held <= 3_000_000
    with pytest.raises(EngineError, match="kv_cache_bytes=1000"):
        engine_of(model, kv_cache_bytes=1000).generate([[5]], params)


def test_non_finite_weights_are_an_error_that_names_the_sequence(model):
    """NaN logits stop the call with prompt, completion and version, instead of returning garbage."""
    engine = engine_of(model)
    with torch.no_grad():
        engine.model.get_submodule("model.norm").weight.fill_(math.nan)
    with pytest.raises(EngineError, match=r"prompt 0 completion 0 token 0.*weights version 1"):
        engine.generate([[5, 6]], SamplingParams(n=2))


def test_bad_sampling_params_are_all_listed():
    """Every nonsensical value is named in one message."""
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(
            n=0, temperature=math.nan, top_p=0.0, top_k=-1, max_tokens=0, min_tokens=3, stop=("",), seed=-1,
            stop_token_ids=(-5,),
        )  # fmt: skip
    message = str(caught.value)
    for part in (
        "n=0",
        "temperature=nan",
        "top_p=0.0",
        "top_k=-1",
        "max_tokens=0",
        "min_tokens=3",
        "stop=",
        "seed=-1",
    ):
        assert part in message, part
    assert "stop_token_ids=(-5,)" in message


def test_policy_may_refuse_temperature_and_truncation(model):
    """A policy with logprobs refuse/refuse refuses T != 1 and top-k/top-p by its keys, and lets greedy pass."""
    tree = load_policy("bf16").to_dict()
    tree["logprobs"] |= {"temperature": "refuse", "truncation": "refuse"}
    strict = make_model("qwen3", tree | {"name": "strict"})
    engine = engine_of(strict)
    with pytest.raises(SamplingParamsError) as caught:
        engine.generate([[5]], SamplingParams(temperature=0.5, top_k=3))
    assert "logprobs.temperature" in str(caught.value)
    assert "logprobs.truncation" in str(caught.value)
    engine.generate([[5]], SamplingParams(temperature=0.0))
    engine.generate([[5]], SamplingParams())


def test_sleep_wake_and_close(model):
    """Level 1 frees the KV cache and changes no result; level 2 drops the weights and needs an update; a closed or
    sleeping engine refuses work."""
    engine = engine_of(model)
    params = SamplingParams(max_tokens=5, seed=1)
    before = ids_of(engine.generate([[5, 6]], params))
    engine.sleep()
    assert engine._cache is None
    for call in (lambda: engine.generate([[5]], params), engine.attest, lambda: engine.update_weights(None)):
        with pytest.raises(EngineError, match="sleeps"):
            call()
    engine.wake()
    assert ids_of(engine.generate([[5, 6]], params)) == before
    engine.sleep(level=2)
    engine.wake()
    assert engine.weights_version == -1
    with pytest.raises(EngineError, match="no weights"):
        engine.generate([[5, 6]], params)
    engine.update_weights(export_weights(model, 2))
    assert ids_of(engine.generate([[5, 6]], params)) == before
    with pytest.raises(ValueError, match="level=3"):
        engine.sleep(3)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[5, 6]], params)


def test_callers_random_state_is_untouched(engine):
    """Generating reads and reseeds no global generator."""
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    engine.generate([[5, 6]], SamplingParams(max_tokens=3, seed=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_seeds_must_match_the_prompts(engine):
    """One seed per prompt, non-negative."""
    for seeds in ([1], [1, -2], [1, 2, 3]):
        with pytest.raises(ValueError, match="one non-negative integer per prompt"):
            engine.generate([[5], [6]], SamplingParams(), seeds=seeds)


def test_bad_options_are_refused():
    """Non-positive sizes and a context beyond the model's are errors."""
    config = CONFIGS["qwen3"]()
    with pytest.raises(ValueError, match="max_num_seqs=0") as caught:
        make_engine("torch", config, "bf16", max_num_seqs=0, max_prefill_tokens=-1)
    assert "max_prefill_tokens=-1" in str(caught.value)
    with pytest.raises(ValueError, match="max_model_len=513"):
        make_engine("torch", config, "bf16", max_model_len=513)
