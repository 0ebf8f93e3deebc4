"""When a completion ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rllib_llm.engines.base import FinishReason, SamplingParams
from rllib_llm.models.checkpoint import eos_token_ids

if TYPE_CHECKING:
    from rllib_llm.settings.groups import RolloutSettings

_CONTEXT_TOKENS = (
    8  # a character may be spread over several byte tokens: decode a little before the longest stop string
)


_HALF_CHARACTER = "\ufffd"
"""What tokenizers decode the first bytes of a character to; the token that brings the last replaces it."""


class TokenDecoder(Protocol):
    """The one method that stop strings need from a transformers tokenizer."""

    def decode(self, token_ids: Sequence[int], **kwargs: object) -> str: ...


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
    """The ids that end a completion and are banned before `min_tokens`, sorted: `stop_token_ids` and, unless ignored,
    the model's end-of-sequence ids.
    """
    eos = () if params.ignore_eos else tuple(eos_token_ids)
    return tuple(sorted({*eos, *params.stop_token_ids}))


def ids_of_model(eos_token_id: int | Sequence[int], vocab: int) -> tuple[int, ...]:
    """The option `eos_token_id` of an engine as ids; ValueError if the model, which has `vocab` ids, lacks one."""
    ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    if not all(0 <= t < vocab for t in ids):
        raise ValueError(f"eos_token_id={eos_token_id}: the model's ids are 0 to {vocab - 1}")
    return ids


def end_ids(rollout: RolloutSettings, config: Any, path: Path | None) -> list[int]:
    """The ids that end an answer in a run, sorted, as its engine has them: of the model's files or the engine's option
    `eos_token_id`, and `stop_token_ids`.

    Args:
        config, path: of the model (`rllib_llm.models.checkpoint.eos_token_ids`).
    """
    named = rollout.engine_options.get("eos_token_id")
    eos = eos_token_ids(config, path) if named is None else ids_of_model(named, config.vocab_size)
    return sorted({*eos, *rollout.stop_token_ids})


def stop_id_problems(params: SamplingParams, eos_token_ids: Iterable[int], vocab: int) -> list[str]:
    """What is wrong with the ids that end a completion of a model that has `vocab` ids; empty if nothing."""
    problems = []
    outside = [t for t in params.stop_token_ids if t >= vocab]
    if outside:
        problems.append(f"stop_token_ids={outside}: outside the vocabulary, whose ids are below {vocab}")
    if params.min_tokens and len(stop_ids(params, eos_token_ids)) - len({*outside}) >= vocab:
        problems.append(
            f"min_tokens={params.min_tokens}: every id ends a completion, so none is left for its first tokens"
        )
    return problems


class StopRule:
    """Stop ids and stop strings of one `generate` call.

    A stop string counts when its last character comes with the newest token. The text is decoded from the
    last tokens only (a token carries at least one byte, so a string of b bytes spans at most b tokens):
    cost does not grow with the answer.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Iterable[int], tokenizer: TokenDecoder | None
    ) -> None:
        if params.stop and tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} needs a tokenizer to compare text: give the engine a model "
                f"directory that has "
                "one, or tokenizer=…, or use stop_token_ids"
            )
        self.stop_ids = stop_ids(params, eos_token_ids)
        self._stop_set = frozenset(self.stop_ids)
        self._params = params
        self._tokenizer = tokenizer
        self._window = max((len(s.encode()) for s in params.stop), default=0) + _CONTEXT_TOKENS

    def check(self, token_ids: Sequence[int], tokens_left: int) -> FinishReason | None:
        """Why a completion that just got its last token ends now, or None.

        Args:
            token_ids: the completion so far, newest last.
            tokens_left: how many more tokens fit into the model's context.
        """
        count = len(token_ids)
        if count > self._params.min_tokens:  # the first min_tokens tokens end nothing, as in vLLM
            if token_ids[-1] in self._stop_set:
                return "stop"
            if self._params.stop and self._completes_stop_string(token_ids):
                return "stop"
        if count >= self._params.max_tokens or tokens_left <= 0:
            return "length"
        return None

    def _completes_stop_string(self, token_ids: Sequence[int]) -> bool:
        tail = list(token_ids[-self._window :])
        text, before = self._decode(tail), self._decode(tail[:-1]).rstrip(_HALF_CHARACTER)
        return any(text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in self._params.stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None  # the constructor refuses stop strings without one
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
