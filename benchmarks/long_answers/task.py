"""Chains of arithmetic modulo 10 with counted working: answers as long as one likes, right or wrong at the end.

    prompt   <bos> L163 +8 . L162 *7 . L161 -5 . L160 +1 3     PERIOD operations, and the value they start from
    answer   L159 +8 1  L158 *7 7  L157 -5 2  L156 +1 3 ... L0 +1 6 # 6 <eos>

One token each, also an operation with its digit. The answer repeats the operations in turn and counts down; its steps
(label, operation, value) look like those of the prompt, whose values are hidden but for the last. Every token follows
from tokens at fixed distances, which is what a small model learns in minutes and what carries over to longer answers.
Multipliers are 3, 7, 9, which have inverses modulo 10: a wrong value is never forgotten, so one slip anywhere in the
working makes the answer wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB = 256
PAD, BOS, EOS, HIDDEN, HASH = 0, 1, 2, 3, 4
DIGITS = 10
OPERATIONS = 20
"""+0..+9, -0..-9, *0..*9"""
LABELS = 64
PERIOD = 4
LONGEST = VOCAB - LABELS - PERIOD
"""Most steps of a problem: labels count prompt and answer."""
TOKENS_PER_STEP = 3


@dataclass(frozen=True)
class Problems:
    """n problems. first, steps int64 [n]; operators (0 +, 1 -, 2 *) and digits int64 [n, PERIOD]."""

    first: np.ndarray
    operators: np.ndarray
    digits: np.ndarray
    steps: np.ndarray

    def prompts(self) -> np.ndarray:
        """int64 [n, 3 * PERIOD + 1]."""
        n = len(self.first)
        body = self._working(np.full((n, PERIOD), HIDDEN - DIGITS), -PERIOD)
        body[:, -1] = DIGITS + self.first
        return np.concatenate([np.full((n, 1), BOS), body], axis=1)

    def answers(self, values: np.ndarray) -> np.ndarray:
        """int64 [n, 3k + 3] for the working `values` [n, k] of problems of k steps."""
        n = len(self.first)
        end = [np.full(n, HASH), DIGITS + values[:, -1], np.full(n, EOS)]
        return np.concatenate([self.working(values), np.stack(end, axis=1)], axis=1)

    def working(self, values: np.ndarray) -> np.ndarray:
        """int64 [n, 3k]: the first k steps of the answers."""
        return self._working(values, 0)

    def _working(self, values: np.ndarray, begin: int) -> np.ndarray:
        """Steps `begin`, `begin` + 1, ... with these values."""
        n, k = values.shape
        out, step = np.empty((n, k, 3), np.int64), np.arange(begin, begin + k)
        out[..., 0] = LABELS + self.steps[:, None] - 1 - step
        out[..., 1] = OPERATIONS + (10 * self.operators + self.digits)[:, step % PERIOD]
        out[..., 2] = DIGITS + values
        return out.reshape(n, 3 * k)

    def values(self, count: int | None = None, slip: float = 0.0, rng: Any = None) -> np.ndarray:
        """int64 [n, count], by default all steps of the longest; with probability `slip` a step is off by 1..9 and
        the next ones go on from there."""
        n, k = len(self.first), int(self.steps.max()) if count is None else count
        wrong = np.zeros((n, k), np.int64)
        if slip:
            wrong = np.where(rng.random((n, k)) < slip, rng.integers(1, 10, (n, k)), 0)
        out, value = np.empty((n, k), np.int64), self.first
        for i in range(k):
            d, op = self.digits[:, i % PERIOD], self.operators[:, i % PERIOD]
            value = np.where(op == 0, value + d, np.where(op == 1, value - d, value * d))
            value = (value + wrong[:, i]) % 10
            out[:, i] = value
        return out


def answer_tokens(steps: int) -> int:
    """Tokens of a complete answer, <eos> included."""
    return TOKENS_PER_STEP * steps + 3


def prompt_tokens() -> int:
    return TOKENS_PER_STEP * PERIOD + 1


def draw(rng: np.random.Generator, count: int, steps: int | np.ndarray) -> Problems:
    """Random problems of `steps` steps, one number or int64 [count]."""
    every = np.broadcast_to(np.asarray(steps, np.int64), (count,))
    if every.min() < 1 or every.max() > LONGEST:
        raise ValueError(f"steps = {steps}: 1 to {LONGEST}, a label names one step")
    operators = rng.integers(0, 3, (count, PERIOD))
    digits = rng.integers(0, 10, (count, PERIOD))
    digits = np.where(operators == 2, np.array([3, 7, 9])[rng.integers(0, 3, (count, PERIOD))], digits)
    return Problems(rng.integers(0, 10, count), operators, digits, every)


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
