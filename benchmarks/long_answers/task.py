"""Chains of arithmetic modulo 10 with labelled working: answers as long as one likes, right or wrong at the end.

    prompt   <bos> 3 L7 +8 L8 *7 L9 -5 =             first value, then (label, operation) per step
    answer   L7 +8 1 L8 *7 7 L9 -5 2 # 2 <eos>       (label, operation, value) per step

One token each, also the operation with its digit. Multipliers are 3, 7, 9, which have inverses modulo 10: a wrong value
is never forgotten, so one slip anywhere in the working makes the answer wrong. All problems of a batch have the same
number of steps. A label names one step, which makes copying an operation from the prompt a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB = 256
PAD, BOS, EOS, EQUALS, HASH = 0, 1, 2, 3, 4
DIGITS = 10
OPERATIONS = 20
"""+0..+9, -0..-9, *0..*9"""
LABELS = 64
NUM_LABELS = VOCAB - LABELS
PROMPT_TOKENS_PER_STEP, ANSWER_TOKENS_PER_STEP = 2, 3


@dataclass(frozen=True)
class Problems:
    """n problems of k steps. first int64 [n], operators (0 +, 1 -, 2 *), digits, labels int64 [n, k]."""

    first: np.ndarray
    operators: np.ndarray
    digits: np.ndarray
    labels: np.ndarray

    @property
    def steps(self) -> int:
        return int(self.digits.shape[1])

    def prompts(self) -> np.ndarray:
        """int64 [n, 2k + 3]."""
        n, k = self.digits.shape
        out = np.empty((n, prompt_tokens(k)), np.int64)
        out[:, 0], out[:, 1], out[:, -1] = BOS, DIGITS + self.first, EQUALS
        body = out[:, 2:-1].reshape(n, k, 2)
        body[..., 0], body[..., 1] = LABELS + self.labels, self._operations()
        return out

    def answers(self, values: np.ndarray) -> np.ndarray:
        """int64 [n, 3k + 3] for the working `values` [n, k]."""
        n, k = self.digits.shape
        out = np.empty((n, answer_tokens(k)), np.int64)
        body = out[:, :-3].reshape(n, k, 3)
        body[..., 0], body[..., 1] = LABELS + self.labels, self._operations()
        body[..., 2] = DIGITS + values
        out[:, -3], out[:, -2], out[:, -1] = HASH, DIGITS + values[:, -1], EOS
        return out

    def _operations(self) -> np.ndarray:
        return OPERATIONS + 10 * self.operators + self.digits

    def values(self, slip: float = 0.0, rng: np.random.Generator | None = None) -> np.ndarray:
        """int64 [n, k]; with probability `slip` a step is off by 1..9 and the next ones go on from there."""
        n, k = self.digits.shape
        wrong = np.zeros((n, k), np.int64)
        if slip:
            assert rng is not None, "slips are random"
            wrong = np.where(rng.random((n, k)) < slip, rng.integers(1, 10, (n, k)), 0)
        out, value = np.empty((n, k), np.int64), self.first
        for i in range(k):
            d, op = self.digits[:, i], self.operators[:, i]
            value = np.where(op == 0, value + d, np.where(op == 1, value - d, value * d))
            value = (value + wrong[:, i]) % 10
            out[:, i] = value
        return out


def answer_tokens(steps: int) -> int:
    """Tokens of a complete answer, <eos> included."""
    return ANSWER_TOKENS_PER_STEP * steps + 3


def prompt_tokens(steps: int) -> int:
    return PROMPT_TOKENS_PER_STEP * steps + 3


def draw(rng: np.random.Generator, count: int, steps: int) -> Problems:
    """Random problems. Labels are consecutive from a random one on, so every label is met at every place."""
    if not 1 <= steps <= NUM_LABELS:
        raise ValueError(f"steps = {steps}: 1 to {NUM_LABELS}, a label names one step")
    operators = rng.integers(0, 3, (count, steps))
    digits = rng.integers(0, 10, (count, steps))
    digits = np.where(operators == 2, np.array([3, 7, 9])[rng.integers(0, 3, (count, steps))], digits)
    start = rng.integers(0, NUM_LABELS, (count, 1))
    labels = (start + np.arange(steps)) % NUM_LABELS
    return Problems(rng.integers(0, 10, count), operators, digits, labels)


def rewards(problems: Problems, completions: list[np.ndarray]) -> np.ndarray:
    """float32 [len(completions)]: 1 if the answer ends ``# value <eos>`` with the right value.

    completions: int64 [L] each, len(problems) * group of them, those of one problem adjacent.
    """
    group = len(completions) // len(problems.first)
    truth = problems.values()[:, -1].repeat(group)
    return np.array(
        [_right(ids, DIGITS + value) for ids, value in zip(completions, truth, strict=True)], np.float32
    )


def _right(ids: np.ndarray, value: int) -> bool:
    return len(ids) >= 3 and ids[-3] == HASH and ids[-2] == value and ids[-1] == EOS


def model_config(**changes: Any) -> Any:
    """A Qwen3 of 0.5 M parameters whose every dimension is a multiple of 128, so that nothing is exempt from FP8.

    head_dim is 128 because FlashAttention-3 sums keys in blocks of another size when it decodes with head_dim 64.
    """
    from transformers import Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
    }  # fmt: skip
    return Qwen3Config(
        **(sizes | changes), tie_word_embeddings=True, initializer_range=0.05, rope_theta=10000.0,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
