"""From an environment's text to token ids and from sampled ids to text, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rllib_llm.envs.protocol import Prompt

__all__ = ["PromptEncoder"]

_PLACEHOLDER = "\u241e"  # a visible symbol that no chat template rewrites


class PromptEncoder:
    """Encodes prompts and observations, decodes answers.

    tokenizer: a transformers tokenizer. Only prompts and observations are ever encoded; what the model wrote
    stays the ids that were sampled.
    ends: the ids that end an answer; an environment does not see those that are special tokens.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._chat_turn: tuple[str, str] | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the tokenizer's chat template.

        Raises ValueError when messages come without a chat template, or nothing is left to encode.
        """
        if prompt.messages is None:
            ids = list(self.tokenizer(prompt.text)["input_ids"])
        else:
            self._require_template()
            text = self.tokenizer.apply_chat_template(
                prompt.messages, tokenize=False, add_generation_prompt=True
            )
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise ValueError(f"the prompt {prompt!r} encodes to no tokens")
        return ids

    def encode_observation(self, text: str, is_chat: bool, completion_ids: Sequence[int]) -> list[int]:
        """Ids that the environment adds after an answer; in a chat, a user turn and the opening of the next answer."""
        if not is_chat:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        closing, opening = self._turn_text()
        ids = list(
            self.tokenizer(closing + opening.replace(_PLACEHOLDER, text), add_special_tokens=False)[
                "input_ids"
            ]
        )
        # The template closes an answer with the end-of-turn token, which a finished answer already has.
        if ids and completion_ids and ids[0] == completion_ids[-1]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """What the model wrote, as the environment reads it.

        Without the tokens that mark beginning, end and padding, and without ids that the tokenizer has no text for. Any
        other special token is text that was written: answer tags may be special tokens.
        """
        kept = [int(t) for t in token_ids if int(t) in self._ids and int(t) not in self._marks]
        return self._text(kept)

    def unknown(self, token_ids: Iterable[int]) -> int:
        """How many of the ids the tokenizer has no text for: a model may have more ids than its tokenizer."""
        return sum(int(t) not in self._ids for t in token_ids)

    def read_back(self, text: str) -> str:
        """`text` as an environment would read it if the model wrote it in this tokenizer's tokens."""
        return self.decode(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def closing_token(self) -> int | None:
        """The token with which the chat template closes an answer; None if it writes no token of that kind.

        Raises whatever a broken template does.
        """
        self._require_template()
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _PLACEHOLDER}]
        closing = self._render(turns, add_generation_prompt=False).rpartition(_PLACEHOLDER)[2]
        ids = list(self.tokenizer(closing, add_special_tokens=False)["input_ids"]) if closing else []
        return next((int(t) for t in ids if t in self.special_ids), None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, named or added."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {
            int(t) for t, token in added.items() if token.special
        }

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Special tokens with a role (beginning, end, padding, unknown …), and those that end an answer."""
        roles = self.tokenizer.convert_tokens_to_ids(list(self.tokenizer.special_tokens_map.values()))
        return frozenset(roles) | (self._ends & self.special_ids)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _turn_text(self) -> tuple[str, str]:
        """(what the template puts after an answer, a user turn with the placeholder as its content)."""
        if self._chat_turn is None:
            self._require_template()
            user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": _PLACEHOLDER}
            before = self._render([user, answer], add_generation_prompt=False)
            after = self._render([user, answer, user | {"content": _PLACEHOLDER}], add_generation_prompt=True)
            appended = after.removeprefix(before) if after.startswith(before) else ""
            if before.count(_PLACEHOLDER) != 1 or appended.count(_PLACEHOLDER) != 1:
                raise ValueError(
                    "the tokenizer's chat template rewrites earlier turns when one is added, so a conversation "
                    "cannot be continued token by token. Use a template that only appends, or prompts with text "
                    "instead of messages."
                )
            self._chat_turn = (before.partition(_PLACEHOLDER)[2], appended)
        return self._chat_turn

    def _render(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    def _require_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the environment gives chat messages, but the model's tokenizer has no chat_template; set "
                "env.config.prompt.chat = false or add a chat_template to the tokenizer's directory."
            )
