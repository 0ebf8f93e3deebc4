"""Playing groups of text episodes: one engine call per turn for all conversations, token ids never re-tokenised."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from rllib_llm.engines.base import Completion, RolloutEngine, SamplingParams
from rllib_llm.envs.calls import EnvCaller, as_prompt, checked_step
from rllib_llm.envs.protocol import TextEnv, describe_error
from rllib_llm.rollout.episode import TextEpisode
from rllib_llm.rollout.prompting import PromptEncoder

__all__ = ["Conversation", "RolloutStats", "play", "seed_of"]

logger = logging.getLogger(__name__)


def seed_of(*parts: int | str) -> int:
    """Non-negative 63-bit seed that depends on every part, on no process and on no batch."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class RolloutStats:
    """Counters of one call of `play`."""

    tokens: int = 0
    unknown_tokens: int = 0
    """of them, ids that the tokenizer has no text for"""
    errors: int = 0
    """episodes lost because an environment raised"""
    last_error: str | None = None
    """the last of them, in words"""
    where: str = ""
    """the runner, for the log"""

    def lost(self, episodes: int, what: str) -> None:
        self.errors += episodes
        self.last_error = f"{what} ({self.where})" if self.where else what
        logger.warning(self.last_error)


@dataclass
class Conversation:
    """An episode while it is being played."""

    env: TextEnv
    group_id: int
    sample_index: int
    prompt_ids: list[int]
    is_chat: bool
    info: dict[str, Any]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    done: bool = False
    failed: bool = False
    truncated: bool = False
    version: int | None = None

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    def append(
        self,
        token_ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        written_by_model: bool,
    ) -> None:
        self.completion_ids.extend(int(t) for t in token_ids)
        self.logprobs.extend(float(x) for x in logprobs)
        self.loss_mask.extend([written_by_model] * len(token_ids))

    @cached_property
    def episode(self) -> TextEpisode:
        """The finished episode; read it only when `done`."""
        assert self.version is not None, "an episode is read before its first answer"
        return TextEpisode(
            prompt_ids=np.asarray(self.prompt_ids, np.int64),
            completion_ids=np.asarray(self.completion_ids, np.int64),
            logprobs=np.asarray(self.logprobs, np.float32),
            loss_mask=np.asarray(self.loss_mask, bool),
            reward=self.reward,
            group_id=self.group_id,
            weights_version=self.version,
            truncated=self.truncated,
            num_turns=self.turns,
            rewards=dict(self.rewards),
            info=self.info,
        )


def play(
    engine: RolloutEngine,
    encoder: PromptEncoder,
    make: Callable[[], TextEnv],
    indices: Sequence[int],
    params: SamplingParams,
    *,
    max_turns: int,
    max_context: int,
    max_prompt_tokens: int | None,
    seed: Callable[[int, int, int], int],
    on_event: Callable[[str, Conversation], None],
    call_env: EnvCaller | None = None,
    where: str = "",
) -> tuple[list[TextEpisode], RolloutStats]:
    """Plays `params.n` episodes of each problem index.

    seed(index, sample, turn) gives the seed of one engine request; the first turn of a group is one request
    (sample 0) of n completions, later turns are one request per conversation. on_event(name, conversation) is
    called with "created", "start", "step" and "end".

    An environment that raises (SystemExit too), hangs or returns what it must not costs its episode: it is logged,
    counted and left out. call_env: makes the environment's calls, with a time limit; None: without one. where: the
    runner's name for the log.
    """
    stats = RolloutStats(where=where)
    call_env = EnvCaller(None) if call_env is None else call_env
    call_env.forgive()
    longest = min(max_context - 1, max_prompt_tokens or max_context)
    groups = _open(encoder, make, indices, params.n, longest, stats, on_event, call_env)
    requests = groups
    while requests:
        seeds = [seed(r[0].group_id, r[0].sample_index, r[0].turns) for r in requests]
        answers = _generate(engine, [r[0].context for r in requests], params, seeds, stats)
        for request, row in zip(requests, answers, strict=True):
            for conversation, completion in zip(request, row, strict=True):
                _answer(conversation, completion, encoder, max_turns, max_context, stats, on_event, call_env)
        requests = [[c] for group in groups for c in group if not c.done]
        params = dataclasses.replace(params, n=1)
    return [c.episode for group in groups for c in group if not c.failed], stats


def _open(
    encoder: PromptEncoder,
    make: Callable[[], TextEnv],
    indices: Sequence[int],
    group_size: int,
    max_prompt_tokens: int,
    stats: RolloutStats,
    on_event: Callable[[str, Conversation], None],
    call_env: EnvCaller,
) -> list[list[Conversation]]:
    """One group of conversations per index, prompts encoded; an index whose prompt cannot be made is left out."""
    groups = []
    for index in indices:
        try:
            envs = [call_env("the environment's constructor", make) for _ in range(group_size)]
            prompts = [as_prompt(call_env("reset()", partial(env.reset, index))) for env in envs]
            prompt_ids = encoder.encode(prompts[0])
            if len(prompt_ids) > max_prompt_tokens:
                raise ValueError(f"the prompt has {len(prompt_ids)} tokens, {max_prompt_tokens} are allowed")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an environment may raise anything, SystemExit too
            reason = describe_error(error)
            stats.lost(group_size, f"problem {index} is left out, its environment failed: {reason}")
            continue
        is_chat = prompts[0].messages is not None
        group = [
            Conversation(env, index, i, list(prompt_ids), is_chat, dict(prompt.info))
            for i, (env, prompt) in enumerate(zip(envs, prompts, strict=True))
        ]
        for conversation in group:
            on_event("created", conversation)
            on_event("start", conversation)
        groups.append(group)
    return groups


def _generate(
    engine: RolloutEngine,
    prompts: list[list[int]],
    params: SamplingParams,
    seeds: list[int],
    stats: RolloutStats,
) -> list[list[Completion]]:
    answers = engine.generate(prompts, params, seeds=seeds)
    stats.tokens += sum(len(c.token_ids) for row in answers for c in row)
    return answers


def _answer(
    conversation: Conversation,
    completion: Completion,
    encoder: PromptEncoder,
    max_turns: int,
    max_context: int,
    stats: RolloutStats,
    on_event: Callable[[str, Conversation], None],
    call_env: EnvCaller,
) -> None:
    """Hands one answer to the environment and appends what it says back."""
    c = conversation
    stats.unknown_tokens += encoder.unknown(completion.token_ids)
    c.append(completion.token_ids, completion.logprobs, written_by_model=True)
    c.turns += 1
    if c.version is not None and completion.weights_version != c.version:
        raise RuntimeError(
            f"one episode was sampled with weights {c.version} and {completion.weights_version}: an engine must "
            "not change weights between the turns of one sample() call."
        )
    c.version = completion.weights_version
    c.truncated = completion.finish_reason == "length"
    try:
        text = encoder.decode(completion.token_ids)
        result = checked_step(call_env("step()", partial(c.env.step, text)))
        c.reward = _finite("the reward", c.reward + result.reward)
        for name, value in result.rewards.items():
            c.rewards[name] = _finite(f"reward {name!r}", c.rewards.get(name, 0.0) + value)
        c.info |= result.info
        c.done = result.done or c.turns >= max_turns
        if not c.done:
            observation = encoder.encode_observation(result.observation, c.is_chat, c.completion_ids)
            if len(c.context) + len(observation) >= max_context:
                c.done = c.truncated = True
            else:
                c.append(observation, [0.0] * len(observation), written_by_model=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an environment may raise anything, SystemExit too
        c.done = c.failed = True
        problem = f"problem {c.group_id}" + (f" ({c.info['id']})" if "id" in c.info else "")
        stats.lost(1, f"an episode of {problem} is dropped: {describe_error(error)}")
        return
    on_event("end" if c.done else "step", c)


def _finite(what: str, value: float) -> float:
    """`value`, if fp32 can hold it: advantages are fp32, and one infinite reward would spoil its whole group."""
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{what} is {value}, not a finite fp32 number")
    return value
