"""From episodes and advantages to one `Shard` per learner, with equally loaded learners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_llm.learner.micro_batch import Shard
from rllib_llm.rollout.episode import TextEpisode

__all__ = ["assign_minibatches", "balance", "make_shards"]


def assign_minibatches(num_sequences: int, epochs: int, minibatches: int, seed: int) -> np.ndarray:
    """int64 [S, epochs]: the optimiser step of each epoch that trains a sequence.

    Every epoch is a new permutation cut into equal parts. Assigned before sharding, so the steps do not
    depend on the number of learners.
    """
    rng = np.random.default_rng(seed)
    out = np.empty((num_sequences, epochs), np.int64)
    for epoch in range(epochs):
        ranks = np.empty(num_sequences, np.int64)
        ranks[rng.permutation(num_sequences)] = np.arange(num_sequences)
        out[:, epoch] = ranks * minibatches // num_sequences
    return out


def balance(lengths: Sequence[int], parts: int, classes: Sequence[int]) -> list[list[int]]:
    """Splits rows into `parts` lists of nearly equal tokens, and so within each class (first-epoch minibatch).

    Longest first, each to the part with the fewest tokens of its class, then with the fewest tokens in all
    (Graham's LPT rule). Rows are ascending in each part.
    """
    members: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    load_of: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        class_load = load_of.setdefault(classes[row], [0] * parts)
        part = min(range(parts), key=lambda p: (class_load[p], load[p], p))
        members[part].append(row)
        class_load[part] += lengths[row]
        load[part] += lengths[row]
    return [sorted(rows) for rows in members]


def make_shards(
    episodes: Sequence[TextEpisode], advantages: np.ndarray, num_shards: int, minibatch: np.ndarray
) -> list[Shard]:
    """One shard per learner; a shard may be empty. advantages: float32 [S]; minibatch: int64 [S, epochs]."""
    rows_of = balance([e.num_tokens for e in episodes], num_shards, minibatch[:, 0].tolist())
    return [_shard(episodes, advantages, minibatch, rows) for rows in rows_of]


def _shard(
    episodes: Sequence[TextEpisode], advantages: np.ndarray, minibatch: np.ndarray, rows: list[int]
) -> Shard:
    chosen = [episodes[row] for row in rows]
    index = np.asarray(rows, np.int64)

    def flat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)

    return Shard(
        lengths=np.asarray([e.num_tokens for e in chosen], np.int64),
        sequence_index=index,
        advantages=advantages[index].astype(np.float32),
        minibatch=minibatch[index],
        token_ids=flat([a for e in chosen for a in (e.prompt_ids, e.completion_ids)], np.int64),
        trained=flat([a for e in chosen for a in (np.zeros(len(e.prompt_ids), bool), e.loss_mask)], bool),
        rollout_logprobs=flat(
            [a for e in chosen for a in (np.zeros(len(e.prompt_ids), np.float32), e.logprobs)], np.float32
        ),
    )
