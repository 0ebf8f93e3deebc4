"""What ends a completion: ids that the model must have, strings of any characters, a length, the context."""

import copy
import dataclasses
from collections.abc import Sequence

import pytest

from rllib_llm.engines import SamplingParams, SamplingParamsError, make_engine
from rllib_llm.engines.stopping import StopRule
from rllib_llm.models.checkpoint import eos_token_ids
from tests.engines.cases import VOCAB, Letters, engine_of, ids_of
from tests.models.cases import random_sequences


def test_every_kind_of_stop(engine):
    """End-of-sequence and stop ids end with "stop" and keep the token that stopped; ignore_eos goes on."""
    prompts = random_sequences((5, 7, 9), VOCAB)
    free, flat = unstopped(engine, prompts, 40)
    eos, stop = flat[0][3], flat[1][5]
    with_eos = make_engine_with_eos(engine, eos)
    stopping = dataclasses.replace(free, stop_token_ids=(stop,))
    results = with_eos.generate(prompts, dataclasses.replace(stopping, ignore_eos=False))
    for full, completion in zip(flat, (c for row in results for c in row), strict=True):
        expected = next((i + 1 for i, t in enumerate(full) if t in (eos, stop)), 40)
        assert completion.token_ids.tolist() == full[:expected]
        assert completion.finish_reason == ("stop" if full[expected - 1] in (eos, stop) else "length")
    for full, ids in zip(
        flat, (i for r in ids_of(with_eos.generate(prompts, stopping)) for i in r), strict=True
    ):
        assert ids == full[: next((i + 1 for i, t in enumerate(full) if t == stop), 40)]


def unstopped(engine, prompts, length):
    """(params, ids) of four answers a prompt that only `length` ends, in one list."""
    free = SamplingParams(n=4, max_tokens=length, seed=6, ignore_eos=True)
    return free, [ids for row in ids_of(engine.generate(prompts, free)) for ids in row]


def make_engine_with_eos(engine, eos):
    other = make_engine("torch", engine.model.config, engine.policy, eos_token_id=eos)
    other.model.load_rollout_tensors(list(engine.model.named_buffers()))
    other._state.version = 1
    return other


def test_stop_strings_across_tokens(model):
    """A string that spans tokens stops at the token that completes it, at the first occurrence."""
    engine = engine_of(model, tokenizer=Letters())
    prompts = random_sequences((5, 7), VOCAB)
    free, flat = unstopped(engine, prompts, 30)
    decode = Letters().decode
    stops = (decode(flat[0][4:8])[1:], decode(flat[1][10:12]))
    results = engine.generate(prompts, dataclasses.replace(free, stop=stops))
    hits = 0
    for full, completion in zip(flat, (c for row in results for c in row), strict=True):
        lengths = [n for n in range(1, 31) if any(s in decode(full[:n]) for s in stops)]
        assert completion.token_ids.tolist() == full[: lengths[0] if lengths else 30]
        hits += completion.finish_reason == "stop"
    assert hits >= 2


def test_stop_strings_need_a_tokenizer(engine):
    """Without a tokenizer a stop string is an error, not ignored."""
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine.generate([[5]], SamplingParams(stop=("x",)))


def test_min_tokens_bans_the_stop_ids(model):
    """Before min_tokens no stop id is ever drawn; right after, it may be."""
    stops = tuple(range(3, 100))
    params = SamplingParams(n=16, max_tokens=12, min_tokens=6, seed=2, stop_token_ids=stops)
    results = engine_of(model).generate(random_sequences((5, 8), VOCAB), params)
    lengths = []
    for completion in (c for row in results for c in row):
        assert not set(completion.token_ids[:6].tolist()) & {2, *stops}
        lengths.append(len(completion.token_ids))
    assert min(lengths) == 7


def test_min_tokens_passes_over_early_stop_strings(model):
    """A string that one of the first min_tokens tokens completes does not count; the first one after them does."""
    engine = engine_of(model, tokenizer=Letters())
    prompts = random_sequences((5, 7), VOCAB)
    free, flat = unstopped(engine, prompts, 30)
    decode = Letters().decode
    stop = decode(flat[0][3:4])
    for minimum in (0, 3, 4, 5):
        asked = dataclasses.replace(free, stop=(stop,), min_tokens=minimum)
        found = [ids for row in ids_of(engine.generate(prompts, asked)) for ids in row]
        for full, ids in zip(flat, found, strict=True):
            ends = [n for n in range(minimum + 1, 31) if decode(full[n - 1 : n]).find(stop) >= 0]
            assert ids == full[: ends[0] if ends else 30]


def test_the_context_ends_a_completion(model):
    """A completion stops as "length" when prompt and answer fill max_model_len, never beyond."""
    engine = engine_of(model, max_model_len=20)
    results = engine.generate(
        random_sequences((19, 12, 4), VOCAB), SamplingParams(max_tokens=50, seed=0, ignore_eos=True)
    )
    assert [len(row[0].token_ids) for row in results] == [1, 8, 16]
    assert {row[0].finish_reason for row in results} == {"length"}


def test_stop_ids_that_the_model_lacks_are_refused(model):
    """Ids beyond the vocabulary, and bans that leave no id, are named beforehand; an end-of-sequence id of the config
    that is no id of the model bans nothing."""
    engine = engine_of(model)
    outside = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(5, VOCAB, VOCAB + 7))
    for call in (engine.generate, engine.submit):
        with pytest.raises(SamplingParamsError, match=rf"stop_token_ids=\[{VOCAB}, {VOCAB + 7}\]: outside"):
            call([[5]], outside)
        with pytest.raises(SamplingParamsError, match="min_tokens=1: every id ends a completion"):
            call([[5]], SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB))))
    with pytest.raises(ValueError, match=f"eos_token_id={VOCAB}: the model's ids are 0 to {VOCAB - 1}"):
        make_engine("torch", model.config, model.policy, eos_token_id=VOCAB)
    config = copy.deepcopy(model.config)
    config.eos_token_id = [2, VOCAB + 1]
    assert eos_token_ids(config, None) == (2,)


class Bytes:
    """A tokenizer whose token i is byte i."""

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("stop", ["€", "b€", "😀", "é", "\n"])
def test_a_stop_string_may_end_in_a_character_of_several_tokens(stop):
    """It counts with the last byte of its last character, wherever the answer goes on, and not before."""
    rule = StopRule(SamplingParams(stop=stop, max_tokens=100), (), Bytes())
    text = f"ab€x😀yé\n{stop}z"
    tokens = list(text.encode())
    end = len(text[: text.index(stop) + len(stop)].encode())
    reasons = [rule.check(tokens[:count], 100) for count in range(1, end + 1)]
    assert reasons == [None] * (end - 1) + ["stop"]
