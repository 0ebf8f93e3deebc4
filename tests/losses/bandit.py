"""A tabular softmax policy that every loss must be able to teach: the smallest task with groups, lengths
and epochs.

Four prompts; a response is up to three tokens of a vocabulary of six, where token 0 ends it. Each prompt
has one right token per position, none of them 0; the reward is the share of the three positions that are
right. Uniform start, whose expected return is 0.140 (position t is right with 1/6 (5/6)^t; the mean of 1/6,
5/36, 25/216).
"""

from __future__ import annotations

import torch

from rllib_llm.losses import LossInputs, informative_groups, make_loss
from rllib_llm.losses.advantages import group_advantages
from rllib_llm.losses.corrections import Correction, correction_weights
from tests.losses.batches import token_advantages

PROMPTS, LENGTH, VOCAB, GROUP = 4, 3, 6, 8


def expected_return(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Exact value of the policy: P[right and not ended before], no sampling."""
    p = logits.softmax(-1)
    alive = torch.cumprod(1 - p[..., 0], dim=1) / (1 - p[..., 0])
    right = p.gather(-1, targets[..., None]).squeeze(-1)
    return float((alive * right).sum(1).mean() / LENGTH)


def train(
    name: str,
    seed: int,
    iterations: int = 60,
    epochs: int = 2,
    lr: float = 0.15,
    rollout_noise: float = 0.0,
    correction: Correction | None = None,
    dynamic_sampling: bool = False,
    learning_sign: float = 1.0,
    **config: float,
) -> float:
    """Expected return after training. rollout_noise: the engine samples from logits with this much fixed
    noise."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(1, VOCAB, (PROMPTS, LENGTH), generator=generator)
    logits = torch.zeros(PROMPTS, LENGTH, VOCAB, requires_grad=True)
    reference = torch.zeros(PROMPTS, LENGTH, VOCAB).log_softmax(-1)
    noise = rollout_noise * torch.randn(PROMPTS, LENGTH, VOCAB, generator=generator)
    optimiser = torch.optim.Adam([logits], lr=lr)
    loss = make_loss(name, max_tokens=LENGTH, **config)
    prompts = torch.arange(PROMPTS).repeat_interleave(GROUP)
    responses = torch.arange(len(prompts))[:, None].expand(-1, LENGTH)
    for _ in range(iterations):
        engine = (logits.detach() + noise).log_softmax(-1)[prompts]
        tokens = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=generator).view(-1, LENGTH)
        ended = (tokens == 0).long()
        mask = (ended.cumsum(1) - ended) == 0  # the ending token itself is trained
        rewards = ((tokens == targets[prompts]) & mask).float().mean(1)
        if loss.advantage_kind == "reinforce++":
            advantages = token_advantages(rewards, None, mask.flatten(), responses.flatten(), 0.0).view_as(
                mask
            )
        else:
            advantages = group_advantages(rewards, prompts, loss.advantage_kind)[:, None].expand(-1, LENGTH)
        if dynamic_sampling:
            mask = mask & informative_groups(rewards, prompts).keep[:, None]
            if not mask.any():
                continue
        advantages = learning_sign * advantages

        def pick(table: torch.Tensor, tokens: torch.Tensor = tokens) -> torch.Tensor:
            return table.gather(-1, tokens[..., None]).flatten()

        old, rollout = pick(logits.detach().log_softmax(-1)[prompts]), pick(engine)
        flat = (mask.flatten(), responses.flatten())
        weights = None if correction is None else correction_weights(correction, old, rollout, *flat)[0]
        for _ in range(epochs):
            table = logits.log_softmax(-1)[prompts]
            inputs = LossInputs(
                logp=pick(table),
                old_logp=old,
                rollout_logp=rollout,
                advantages=advantages.flatten(),
                mask=flat[0],
                sequence_ids=flat[1],
                num_sequences=len(prompts),
                ref_logp=pick(reference[prompts]),
                entropy=-(table.exp() * table).sum(-1).flatten(),
                correction_weights=weights,
            )
            optimiser.zero_grad()
            (loss(inputs).loss_sum / loss.count(*flat, len(prompts))).backward()
            optimiser.step()
    return expected_return(logits.detach(), targets)
