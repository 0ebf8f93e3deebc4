"""What every engine refuses before it samples, and the arithmetic of requests that engines share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from precision_policies import PrecisionPolicy
from rllib_llm.engines.base import PromptError, SamplingParams, SamplingParamsError


def context_length(asked: int | None, supported: int) -> int:
    """Context of an engine in tokens: `asked` (None: all that the model supports).

    Raises:
        ValueError: the model has fewer positions, or no token would fit after a prompt.
    """
    if asked is not None and not 2 <= asked <= supported:
        raise ValueError(
            f"max_model_len={asked}: the model supports 2 to {supported} (max_position_embeddings)"
        )
    return supported if asked is None else asked


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, max_model_len: int) -> None:
    """Refuse prompts that leave no place for one new token, are empty, or hold ids outside the vocabulary.

    Raises:
        PromptError: lists every such prompt.
    """
    problems = []
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            problems.append(f"prompt {index} is empty")
        elif len(prompt) >= max_model_len:
            problems.append(
                f"prompt {index} has {len(prompt)} tokens, the context holds {max_model_len} and one must "
                f"be left to "
                "sample: shorten it or raise max_model_len"
            )
        elif not 0 <= min(prompt) <= max(prompt) < vocab_size:
            problems.append(
                f"prompt {index} holds ids in [{min(prompt)}, {max(prompt)}], the vocabulary is [0, "
                f"{vocab_size})"
            )
    if problems:
        raise PromptError("prompts refused:\n" + "\n".join(f"  - {p}" for p in problems))


def refuse_params(problems: Sequence[str]) -> None:
    """SamplingParamsError that lists `problems`, if there are any."""
    if problems:
        raise SamplingParamsError("sampling parameters refused:\n" + "\n".join(f"  - {p}" for p in problems))


def check_sampling_policy(policy: PrecisionPolicy, params: SamplingParams) -> None:
    """Refuse sampling that the policy excludes (`logprobs.temperature`, `logprobs.truncation`).

    Greedy decoding is never training data and passes.

    Raises:
        SamplingParamsError: lists each parameter with the policy's key.
    """
    if params.temperature == 0:
        return
    problems = []
    if policy.logprobs.temperature == "refuse" and params.temperature != 1.0:
        problems.append(
            f"temperature={params.temperature}: the policy says logprobs.temperature: refuse, use 1.0"
        )
    if policy.logprobs.truncation == "refuse" and (params.top_k or params.top_p < 1.0):
        problems.append(
            f"top_k={params.top_k}, top_p={params.top_p}: the policy says logprobs.truncation: refuse, use 0 and 1.0"
        )
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise SamplingParamsError(f"policy {policy.name!r} refuses these sampling parameters:\n{lines}")


def pending_of(pending: Mapping[int, Any], requests: Sequence[int] | None) -> list[int]:
    """The requests that `abort` ends: those asked for (None: all) that are pending, each once."""
    return list(pending) if requests is None else [r for r in dict.fromkeys(requests) if r in pending]


def check_same_params(pending: SamplingParams, params: SamplingParams) -> None:
    """Refuse to mix sampling parameters among pending requests.

    Raises:
        SamplingParamsError: they differ in more than the seed.
    """
    if dataclasses.replace(pending, seed=None) != dataclasses.replace(params, seed=None):
        raise SamplingParamsError(
            f"requests with {pending} are pending, and {params} were asked for: an engine samples from one "
            "distribution at a time; collect or abort the pending requests first"
        )
