"""One finished conversation between a language model and a text environment, as token ids."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllib_llm import metric_names as names

__all__ = ["TextEpisode"]


@dataclass
class TextEpisode:
    """A prompt, everything written after it, and what the environment paid for it.

    Token ids are kept exactly as they were sampled: text is never decoded and encoded again, because
    encode(decode(ids)) is not the identity and would train tokens nobody sampled.

    Shapes: P prompt tokens, C tokens after the prompt (answers and, with several turns, the
    observations that the environment wrote between them).
    """

    prompt_ids: np.ndarray
    """int64 [P]"""
    completion_ids: np.ndarray
    """int64 [C]"""
    logprobs: np.ndarray
    """float32 [C], log-probability under the distribution the token was drawn from; 0 where loss_mask is 0"""
    loss_mask: np.ndarray
    """bool [C], True for tokens the model wrote, False for tokens the environment wrote"""
    reward: float
    """sum of the rewards of all turns"""
    group_id: int
    """index of the prompt in the training stream; episodes of one group answer the same prompt"""
    weights_version: int
    """version of the weights that sampled every token of the episode"""
    truncated: bool = False
    """the last answer ended because it reached its token limit, not because of a stop token"""
    num_turns: int = 1
    rewards: dict[str, float] = field(default_factory=dict)
    """named parts of the reward, for logging only"""
    info: dict[str, Any] = field(default_factory=dict)
    id_: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        shape = self.completion_ids.shape
        if not (len(shape) == 1 and shape == self.logprobs.shape == self.loss_mask.shape):
            raise ValueError(
                f"TextEpisode: completion_ids {shape}, logprobs {self.logprobs.shape} and loss_mask "
                f"{self.loss_mask.shape} must be vectors of one length."
            )

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_tokens(self) -> int:
        """Length of prompt plus completion: what one forward pass over the episode costs."""
        return len(self.prompt_ids) + len(self.completion_ids)

    # The three methods that RLlib's Algorithm and LearnerGroup ask of an episode. One episode is one
    # env step, so RLlib's step counters (and learning-rate schedules) count completions.
    def __len__(self) -> int:
        return 1

    def env_steps(self) -> int:
        return 1

    def agent_steps(self) -> int:
        return 1

    def get_return(self) -> float:
        """RLlib's name for the undiscounted reward sum."""
        return self.reward

    def metrics(self) -> dict[str, float]:
        """What is averaged over the episodes of an iteration, by the names of `rllib_llm.metric_names`.

        solved_share only where the environment says whether an episode is solved: info["solved"], or ["correct"].
        """
        solved = self.info.get("solved", self.info.get("correct"))
        known = {} if solved is None else {names.SOLVED_SHARE: float(bool(solved))}
        return known | {
            names.EPISODE_RETURN_MEAN: self.reward,
            names.RESPONSE_LENGTH_MEAN: float(self.num_trained_tokens),
            names.PROMPT_LENGTH_MEAN: float(len(self.prompt_ids)),
            names.NUM_TURNS_MEAN: float(self.num_turns),
            names.TRUNCATED_SHARE: float(self.truncated),
        }
