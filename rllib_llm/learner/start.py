"""The adapters that a learner starts with: what the settings say, as new ones or those of a PEFT directory."""

from __future__ import annotations

from rllib_llm.models.adapters import initialise_adapters
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.peft_files import load_adapter
from rllib_llm.settings.groups import AdapterSettings

__all__ = ["start_adapters"]


def start_adapters(lm: CausalLM, settings: AdapterSettings) -> None:
    """Give the model's adapters their first values, equal on every learner."""
    if settings.path is None:
        initialise_adapters(lm, settings.init, settings.seed)
    else:
        load_adapter(lm, settings.path)
