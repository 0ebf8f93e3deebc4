"""What ends a completion: ids that the model must have, and strings of any characters."""

import copy
from collections.abc import Sequence

import pytest

from rllib_llm.engines import SamplingParams, SamplingParamsError, make_engine
from rllib_llm.engines.stopping import StopRule
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
