"""The loop of reinforcement learning with adapters, without Ray: sample, learn, push the adapters, and compare."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.optimizer import PolicyAdamW
from rllib_llm.models import PackedBatch
from rllib_llm.sync.export import export_manifest
from rllib_llm.sync.receiver import InProcessUpdate
from tests.models.adapters import EVERYWHERE, adapted_model

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
WANTED = range(3, 40)
"""Ids that are rewarded; a third of the vocabulary."""


def test_adapters_learn_exactly_on_policy() -> None:
    """In 12 REINFORCE steps the mean reward rises by 0.3; in each, learner and engine agree to the bit."""
    policy = "unified-fp8"
    model = adapted_model("qwen3", policy)
    engine = make_engine("torch", model.config, policy, adapter=EVERYWHERE)
    params = list(model.parameters())
    gradients, optimizer = Gradients(params), PolicyAdamW(params, lr=1e-2)
    manifest = export_manifest(model, 1)
    engine.update_weights(InProcessUpdate(manifest, partial(model.rollout_tensors, again=True)))
    rewards = []
    for version in range(2, 14):
        sampling = SamplingParams(n=16, max_tokens=4, seed=version, ignore_eos=True)
        [answers] = engine.generate([PROMPT], sampling)
        ids = [[*PROMPT, *a.token_ids.tolist()] for a in answers]
        batch = PackedBatch.from_sequences([row[:-1] for row in ids])
        targets = torch.cat([torch.tensor(row[1:]) for row in ids])
        trained = torch.tensor([False] * (len(PROMPT) - 1) + [True] * 4).repeat(len(ids))
        gradients.zero()
        logp = model.token_logprobs(model(batch)[trained], targets[trained])
        sampled = torch.cat([torch.from_numpy(a.logprobs) for a in answers])
        assert float((logp.detach() - sampled).abs().max()) == 0.0
        reward = torch.tensor([float(int(t) in WANTED) for t in targets[trained]])
        rewards.append(float(reward.mean()))
        (-(reward - reward.mean()) * logp).mean().backward()
        gradients.accumulate()
        optimizer.update(gradients.take())
        manifest = export_manifest(model, version, manifest)
        source = partial(model.rollout_tensors, again=True, adapters_only=True)
        engine.update_weights(InProcessUpdate(manifest.of_adapters(), source))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
