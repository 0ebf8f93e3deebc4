"""Models with adapters that do something, for tests."""

from __future__ import annotations

from typing import Any

import torch

from precision_policies import AdapterSpec
from rllib_llm.models import CausalLM, build_model
from rllib_llm.models.adapters import factors as factors_of
from rllib_llm.models.adapters import initialise_adapters, set_factor
from tests.models.cases import CONFIGS

EVERYWHERE = AdapterSpec(8, 16)


def adapted_model(
    kind: str, policy: Any, spec: AdapterSpec = EVERYWHERE, seed: int = 0, **options: Any
) -> CausalLM:
    """A train-side model with a random base and random A and B."""
    model = build_model(CONFIGS[kind](), policy, "train", adapter=spec, **options)
    model.initialise(seed)
    shake(model, seed)
    return model


def shake(model: CausalLM, seed: int) -> None:
    """New A and B, both random."""
    initialise_adapters(model, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, factor in factors_of(model):
        if name.endswith("lora_B"):
            set_factor(factor, torch.randn(factor.plan.shape, generator=generator) * 0.1)


def rollout_of(model: CausalLM) -> CausalLM:
    """The rollout side with the model's weights."""
    rollout = build_model(model.config, model.policy, "rollout", adapter=model.plan.adapter)
    rollout.load_rollout_tensors(model.rollout_tensors())
    return rollout
