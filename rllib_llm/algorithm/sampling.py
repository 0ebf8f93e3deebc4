"""Collecting one iteration's episodes from the env runners."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch

from rllib_llm.algorithm.fleet import LOCAL, Reply, call_runners, runner_ids
from rllib_llm.errors import RllibLLMError
from rllib_llm.losses import informative_groups
from rllib_llm.losses.advantages import uninformative_groups
from rllib_llm.rollout.episode import TextEpisode

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

__all__ = ["Collected", "NoSamplesError", "collect", "dispatch"]

logger = logging.getLogger(__name__)
DISPATCH_ROUNDS = 3  # attempts for a problem whose runner fails: the first, and two on other runners


class NoSamplesError(RllibLLMError, RuntimeError):
    """Iteration after iteration without one usable sample."""


@dataclass
class Collected:
    """Episodes of one iteration, ordered by problem, and what happened on the way."""

    episodes: list[TextEpisode] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    """one tree of RLlib Stats per answering runner call"""
    refused: int = 0
    lost: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost_samples: list[str] = field(default_factory=list)
    """per runner call in which an environment raised: the last reason"""
    uninformative: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def add(self, other: Collected) -> None:
        self.episodes += other.episodes
        self.metrics += other.metrics
        self.refused += other.refused
        self.lost += other.lost
        self.errors += other.errors
        self.lost_samples += other.lost_samples


def dispatch(
    group: EnvRunnerGroup,
    indices: Sequence[int],
    version: int | None,
    timeout_s: float | None,
    *,
    evaluation: bool,
) -> Collected:
    """Has each problem sampled by some runner; problems of a runner that fails go to the others.

    version: episodes sampled with weights of another version are refused (left out and counted).
    """
    out, todo = Collected(), list(indices)
    for _ in range(DISPATCH_ROUNDS):
        runners = runner_ids(group)
        if not todo or not runners:
            break
        shares = {
            runner: todo[i :: len(runners)] for i, runner in enumerate(runners) if todo[i :: len(runners)]
        }
        calls = {
            runner: partial(_sample, indices=share, evaluation=evaluation) for runner, share in shares.items()
        }
        replies = call_runners(group, calls, timeout_s=timeout_s)
        todo = [index for runner in [*replies.died, *replies.timed_out] for index in shares[runner]]
        for runner in replies.timed_out:
            text = f"env runner {runner}: no answer within rollout.sample_timeout_s = {timeout_s:g} s"
            logger.warning("%s; it is ended. Its problems: %s", text, _some(shares[runner]))
            out.errors.append(text)
            _restart(group, runner)
        out.errors += [f"env runner {runner} died" for runner in replies.died]
        for runner, reply in replies.answers.items():
            if reply.error is not None:
                out.errors.append(f"env runner {runner}:\n{reply.error}")
                todo += shares[runner]
                _restart(group, runner)
                continue
            _take(out, reply, version)
    out.lost = sorted(todo)
    order = {index: i for i, index in enumerate(indices)}
    out.episodes.sort(key=lambda e: order[e.group_id])
    return out


def _take(out: Collected, reply: Reply, version: int | None) -> None:
    """Adds what a runner has sampled."""
    episodes, metrics = reply.value
    usable = [e for e in episodes if version is None or e.weights_version == version]
    out.refused += len(episodes) - len(usable)
    out.episodes += usable
    out.metrics.append(metrics)
    if reply.lost_sample is not None:
        out.lost_samples.append(reply.lost_sample)


def collect(
    group: EnvRunnerGroup,
    next_index: int,
    num_prompts: int,
    version: int | None,
    timeout_s: float | None,
    dynamic_rounds: int,
) -> tuple[Collected, int]:
    """One iteration's episodes, and the problem index after the last one used.

    dynamic_rounds 1 samples `num_prompts` problems once. More: rounds go on with new problems until as many
    groups have rewards that differ (DAPO, arXiv 2503.14476, dynamic sampling); the others are dropped.
    """
    out, start, groups = Collected(), time.perf_counter(), 0
    while groups < num_prompts and out.rounds < dynamic_rounds:
        missing = num_prompts - groups
        found = dispatch(group, range(next_index, next_index + missing), version, timeout_s, evaluation=False)
        next_index += missing
        out.rounds += 1
        if dynamic_rounds > 1 and found.episodes:
            before = len({e.group_id for e in found.episodes})
            found.episodes = _informative(found.episodes)
            out.uninformative += before - len({e.group_id for e in found.episodes})
        out.add(found)
        groups = len({e.group_id for e in out.episodes})
        if not found.episodes and dynamic_rounds == 1:
            break
    out.seconds = time.perf_counter() - start
    return out, next_index


def _informative(episodes: list[TextEpisode]) -> list[TextEpisode]:
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    keep = informative_groups(rewards, torch.tensor([e.group_id for e in episodes])).keep
    return [e for e, kept in zip(episodes, keep.tolist(), strict=True) if kept]


def _some(indices: Sequence[int], shown: int = 8) -> str:
    rest = f" and {len(indices) - shown} more" if len(indices) > shown else ""
    return ", ".join(map(str, indices[:shown])) + rest


def _sample(runner: Any, indices: list[int], evaluation: bool) -> Any:
    return runner.sample_reply(indices, evaluation)


def _restart(group: EnvRunnerGroup, runner: int) -> None:
    """Ends an actor whose engine raised; its state is unknown. RLlib restarts it and the Algorithm pushes weights."""
    if runner != LOCAL:
        logger.error("env runner %d failed and is restarted", runner)
        ray.kill(group._worker_manager.actors()[runner], no_restart=False)
        group._worker_manager.set_actor_state(runner, healthy=False)


def groups_without_signal(episodes: Sequence[TextEpisode], advantage_kind: str = "grpo") -> int:
    """Groups that teach nothing because their advantages are all zero.

    Those whose rewards are equal up to rounding (`advantages.is_constant`); for "reinforce++", which compares over
    the batch, all groups or none.
    """
    rewards = torch.tensor([e.reward for e in episodes], dtype=torch.float64)
    groups = torch.tensor([e.group_id for e in episodes], dtype=torch.int64)
    if advantage_kind == "reinforce++":
        constant = uninformative_groups(rewards, torch.zeros_like(groups))
        return len(groups.unique()) if constant else 0
    return uninformative_groups(rewards, groups)
