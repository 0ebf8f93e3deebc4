"""Requests to vLLM as its handle sees them: what is refused beforehand, their names and seeds, those pending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rllib_llm.engines.base import Completion, FinishReason, SamplingParams
from rllib_llm.engines.checks import refuse_params
from rllib_llm.engines.sampler import sequence_seeds
from rllib_llm.engines.stopping import stop_id_problems, stop_ids

Sampled = tuple[np.ndarray, np.ndarray, FinishReason]
"""Token ids int64 [L], log-probs float32 [L], "stop" or "length"."""
MOST_BANNED_IDS = 128
"""vLLM's GPU sampler keeps so many stop ids of a request that has `min_tokens` (0.26 to 0.32)."""


def check_params(
    params: SamplingParams, eos: Sequence[int], vocab: int, has_tokenizer: bool, speculative: bool = False
) -> None:
    """Refuse what vLLM would fail on in the middle of a step, or sample from another distribution than was asked for.

    Args:
        speculative: vLLM drafts tokens: a request then has several rows of logits, of different ages.

    Raises:
        SamplingParamsError: lists all violations.
    """
    problems = stop_id_problems(params, eos, vocab)
    banned = stop_ids(params, eos)
    if params.min_tokens and len(banned) > MOST_BANNED_IDS:
        problems.append(
            f"min_tokens={params.min_tokens} with {len(banned)} end-of-sequence and stop ids: vLLM keeps "
            f"{MOST_BANNED_IDS} of them apart; use fewer, min_tokens=0, or engine='torch'"
        )
    if params.min_tokens and speculative:
        problems.append(
            f"min_tokens={params.min_tokens} with vllm_options['speculative_config']: which drafted tokens are among "
            "the first is not known to the model, which bans stop ids there; use min_tokens=0, or no drafts"
        )
    if params.stop and not has_tokenizer:
        problems.append(f"stop={params.stop}: needs a model directory with a tokenizer; use stop_token_ids")
    refuse_params(problems)


def request_seeds(count: int, params: SamplingParams, seeds: Sequence[int] | None) -> list[list[int]]:
    """``[p][i]``: seed of completion i of prompt p."""
    rows = sequence_seeds(count, params.seed, seeds)
    return [[_request_seed(seed, child) for child in range(params.n)] for seed in rows]


def _request_seed(seed: Sequence[int], child: int) -> int:
    """A 63-bit seed for completion `child`, from numpy's SeedSequence: neighbouring seeds do not overlap."""
    low, high = np.random.SeedSequence([*seed, child]).generate_state(2, np.uint32)
    return int(low) | (int(high) >> 1) << 32


@dataclass(frozen=True)
class Batch:
    """Requests of one completion each, as `VLLMWorker.submit` takes them; all lists have one entry per completion."""

    names: list[str]
    prompts: list[list[int]]
    seeds: list[int]


class Pending:
    """Requests of `n` completions that are neither collected nor aborted, and the completions that they have."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Completion | None]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Mapping[int, Sequence[Completion | None]]:
        """Completions by request id, None for those to come."""
        return self._rows

    def add(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[Sequence[int]]
    ) -> tuple[list[int], Batch]:
        """New ids, and what vLLM is to begin for them."""
        ids = list(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(ids)
        self._rows |= {request: [None] * n for request in ids}
        return ids, Batch(
            [name for request in ids for name in self.names(request)],
            [[int(t) for t in prompt] for prompt in prompts for _ in range(n)],
            [seed for row in seeds for seed in row],
        )

    def names(self, request: int) -> list[str]:
        """What vLLM calls the completions of a request."""
        return [f"{request}/{child}" for child in range(len(self._rows[request]))]

    def take(self, finished: Mapping[str, Sampled], version: int) -> dict[int, list[Completion]]:
        """Enter completions by vLLM's names; the requests that have all of theirs, which are forgotten here."""
        for name, (ids, logprobs, reason) in finished.items():
            request, child = map(int, name.split("/"))
            self._rows[request][child] = Completion(ids, logprobs, reason, version)
        done = {}
        for request, row in self._rows.items():
            complete = [c for c in row if c is not None]
            if len(complete) == len(row):
                done[request] = complete
        self.forget(done)
        return done

    def forget(self, ids: Mapping[int, object] | Sequence[int]) -> None:
        """Drop requests."""
        for request in list(ids):
            del self._rows[request]

    def clear(self) -> None:
        """Drop all."""
        self._rows.clear()
