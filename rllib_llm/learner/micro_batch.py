"""One learner's samples of an iteration as flat arrays, and their cutting into packed micro-batches.

Nothing is padded: sequences lie one after the other, so memory and time depend on the number of tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_llm.models.batch import PackedBatch

__all__ = ["MicroBatch", "Shard", "cut_by_tokens"]

Array = Any  # np.ndarray when a shard is sent, torch.Tensor after RLlib's Learner received it


@dataclass(frozen=True)
class Shard:
    """S sequences of T tokens in all; all arrays are flat."""

    lengths: Array
    """int64 [S], tokens of each sequence (prompt and completion). The first column: RLlib counts rows by it"""
    sequence_index: Array
    """int64 [S], position of the sequence in the iteration's list of episodes"""
    advantages: Array
    """float32 [S]"""
    minibatch: Array
    """int64 [S, epochs], the optimiser step of each epoch that trains the sequence"""
    token_ids: Array
    """int64 [T]"""
    trained: Array
    """bool [T], tokens the model wrote"""
    rollout_logprobs: Array
    """float32 [T], 0 where not trained"""

    def to_batch(self) -> MultiAgentBatch:
        """The only batch class whose arrays RLlib's Learner turns into tensors."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, env_steps=len(self.lengths))

    @classmethod
    def from_columns(cls, columns: dict) -> Shard:
        return cls(**{f.name: columns[f.name] for f in fields(cls)})

    @property
    def starts(self) -> torch.Tensor:
        """int64 [S], offset of each sequence's first token."""
        return torch.cumsum(self.lengths, 0) - self.lengths


@dataclass(frozen=True)
class MicroBatch:
    """B whole sequences of one forward pass, and the N trained tokens among their tokens."""

    packed: PackedBatch
    slots: torch.Tensor
    """int64 [N], index of each trained token in the shard's flat arrays"""
    predict_at: torch.Tensor
    """int64 [N], index into the packed tokens of the hidden state that predicts it (the token before it)"""
    targets: torch.Tensor
    """int64 [N]"""
    rollout_logprobs: torch.Tensor
    """float32 [N]"""
    advantages: torch.Tensor
    """float32 [N], the sequence's advantage on each of its tokens"""
    sequence_ids: torch.Tensor
    """int64 [N], 0..B-1"""
    num_sequences: int

    @property
    def mask(self) -> torch.Tensor:
        """bool [N], all true: tokens that are not trained were left out."""
        return torch.ones_like(self.targets, dtype=torch.bool)

    def starts_of_answers(self, min_tokens: int) -> torch.Tensor | None:
        """bool [N], tokens that are among the first `min_tokens` of their sequence's answer; None if that is 0.

        Of sequences with one answer each, as a minimum length requires.
        """
        if not min_tokens:
            return None
        ids = self.sequence_ids
        position = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)
        return position < min_tokens

    @classmethod
    def of(cls, shard: Shard, rows: Sequence[int]) -> MicroBatch:
        """Packs the given rows of a shard (torch arrays), in the given order."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=shard.lengths.device)
        lengths = shard.lengths[index]
        offsets = torch.cumsum(lengths, 0) - lengths
        row_of_token = torch.repeat_interleave(torch.arange(len(rows), device=index.device), lengths)
        positions = torch.arange(int(lengths.sum()), device=index.device) - offsets[row_of_token]
        flat = shard.starts[index][row_of_token] + positions
        trained = shard.trained[flat].bool()
        here = torch.nonzero(trained).flatten()
        cu_seqlens = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
        token_ids = shard.token_ids[flat]
        sequence_ids = row_of_token[here]
        return cls(
            packed=PackedBatch(token_ids, positions, cu_seqlens),
            slots=flat[here],
            predict_at=here - 1,
            targets=token_ids[here],
            rollout_logprobs=shard.rollout_logprobs[flat[here]].float(),
            advantages=shard.advantages[index][sequence_ids].float(),
            sequence_ids=sequence_ids,
            num_sequences=len(rows),
        )


def cut_by_tokens(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups rows into micro-batches of at most `max_tokens` tokens, by first-fit decreasing.

    A row longer than `max_tokens` gets a micro-batch of its own. Deterministic; rows are ascending in each group.
    """
    groups: list[tuple[int, list[int]]] = []
    for row in sorted(rows, key=lambda r: (-int(lengths[r]), r)):
        for i, (used, members) in enumerate(groups):
            if used + int(lengths[row]) <= max_tokens:
                groups[i] = (used + int(lengths[row]), [*members, row])
                break
        else:
            groups.append((int(lengths[row]), [row]))
    return [sorted(members) for _, members in groups]
