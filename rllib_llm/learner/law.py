"""Which distribution the engine sampled each token from, as the learner scores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rllib_llm.engines.stopping import ids_of_model
from rllib_llm.models.checkpoint import eos_token_ids

if TYPE_CHECKING:
    from rllib_llm.algorithm.settings import RolloutSettings
    from rllib_llm.learner.batch import MicroBatch
    from rllib_llm.models.causal_lm import CausalLM

__all__ = ["RolloutLaw"]


class RolloutLaw:
    """The settings of the rollout as arguments of `CausalLM.token_logprobs`.

    Stop ids are read once, as an engine reads them when it is made: from the model's files, the settings, and the
    engine's option `eos_token_id`.
    """

    def __init__(self, rollout: RolloutSettings, lm: CausalLM) -> None:
        self._rollout = rollout
        named = rollout.engine_options.get("eos_token_id")
        eos = (
            eos_token_ids(lm.config, lm.source_path)
            if named is None
            else ids_of_model(named, lm.architecture.vocab)
        )
        self._stop_ids = sorted({*eos, *rollout.stop_token_ids})

    def of(self, micro: MicroBatch) -> dict[str, Any]:
        """For the N trained tokens of a micro-batch, of which each sequence has one answer if there is a minimum."""
        rollout = self._rollout
        law: dict[str, Any] = {
            "temperature": rollout.temperature,
            "top_k": rollout.top_k,
            "top_p": rollout.top_p,
        }
        if rollout.min_new_tokens:
            ids = micro.sequence_ids
            position = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)
            law |= {"banned_ids": self._stop_ids, "banned_rows": position < rollout.min_new_tokens}
        return law
