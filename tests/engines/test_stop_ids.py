"""Ids that end a completion, in the embedded engine: which are refused, and before what."""

import copy

import pytest

from rllib_llm.engines import SamplingParams, SamplingParamsError, make_engine
from rllib_llm.models.checkpoint import eos_token_ids
from rllib_llm.sync.export import export_weights
from tests.models.cases import make_model

VOCAB = 128


def test_stop_ids_that_the_model_lacks_are_refused():
    """Ids beyond the vocabulary, and bans that leave no id, are named beforehand; an end-of-sequence id of the config
    that is no id of the model bans nothing."""
    model = make_model("qwen3", "bf16")
    engine = make_engine("torch", model.config, model.policy)
    engine.update_weights(export_weights(model, 1))
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
