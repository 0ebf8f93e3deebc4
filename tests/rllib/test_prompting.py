"""Prompts and observations become ids; chats continue token by token."""

from __future__ import annotations

from typing import Any

import pytest

from rllib_llm.envs.protocol import Prompt
from rllib_llm.rollout.prompting import PromptEncoder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = "{% for m in messages[-1:] %}{{ m['content'] }}{% endfor %}"  # shows only the last turn


@pytest.fixture
def tokenizer() -> Any:
    """Characters as ids, the two ChatML marks as one id each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(32, 127)] + ["\n", "\u241e"]
    model = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*letters, "<unk>"])}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def test_continuing_a_chat_equals_rendering_it_whole(tokenizer: Any) -> None:
    """Prompt, sampled answer and observation laid end to end are the template's rendering of the conversation."""
    encoder = PromptEncoder(tokenizer)
    first = {"role": "user", "content": "1+1?"}
    ids = encoder.encode(Prompt(messages=[first]))
    answer = [*tokenizer("3", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = ids + answer + encoder.encode_observation("no, again", True, answer)
    conversation = [first, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no, again"}]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_an_answer_cut_off_by_length_is_closed_first(tokenizer: Any) -> None:
    """Without an end-of-turn token in the answer, the observation begins with one."""
    encoder = PromptEncoder(tokenizer)
    answer = tokenizer("3", add_special_tokens=False)["input_ids"]
    assert encoder.encode_observation("x", True, answer)[0] == tokenizer.eos_token_id
    assert (
        encoder.encode_observation("x", True, [*answer, tokenizer.eos_token_id])[0] != tokenizer.eos_token_id
    )


def test_text_observations_are_encoded_as_they_are(tokenizer: Any) -> None:
    """Without a chat the observation's own tokens are appended, no special tokens."""
    assert PromptEncoder(tokenizer).encode_observation("+1=", False, [1]) == tokenizer("+1=")["input_ids"]


def test_templates_that_rewrite_history_are_refused(tokenizer: Any) -> None:
    """Such a template would need earlier tokens to change; the error says so."""
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        PromptEncoder(tokenizer).encode_observation("x", True, [1])


def test_messages_without_a_template_are_refused(tokenizer: Any) -> None:
    """The error names both ways out."""
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        PromptEncoder(tokenizer).encode(Prompt(messages=[{"role": "user", "content": "x"}]))


def test_empty_prompts_are_refused(tokenizer: Any) -> None:
    """A prompt of no tokens has nothing to condition on."""
    with pytest.raises(ValueError, match="no tokens"):
        PromptEncoder(tokenizer).encode(Prompt(text=""))
