"""Which distribution the engine sampled each token from, as the learner scores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_llm.engines.stopping import end_ids
from rllib_llm.models.sampling_distribution import SamplingDistribution

if TYPE_CHECKING:
    from rllib_llm.models.causal_lm import CausalLM
    from rllib_llm.settings.groups import RolloutSettings

__all__ = ["rollout_distribution"]


def rollout_distribution(rollout: RolloutSettings, lm: CausalLM) -> SamplingDistribution:
    """The distribution that training answers are sampled from.

    Stop ids, which a minimum length bans, are read as an engine reads them when it is made: from the model's files,
    the settings, and the engine's option `eos_token_id`.
    """
    banned = tuple(end_ids(rollout, lm.config, lm.source_path)) if rollout.min_new_tokens else ()
    return SamplingDistribution(
        rollout.temperature, rollout.top_k, rollout.top_p, banned, rollout.min_new_tokens
    )
