"""The rollout engine interface: token ids in, token ids and log-probs out, weights in versions.

Two engines implement it: the embedded `rllib_llm.engines.torch_engine.TorchEngine`, and vLLM. Text never
passes through an engine: the caller tokenises once and trains on the very ids that were sampled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from precision_policies import Attestation
from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.process.memory import peak_memory

if TYPE_CHECKING:
    from rllib_llm.sync.packed import WeightUpdate
    from rllib_llm.sync.receiver import Incoming
    from rllib_llm.sync.stream import StreamOffer
    from rllib_llm.sync.topology import Place
    from rllib_llm.sync.verify import WeightReceipt

FinishReason = Literal["stop", "length"]
NO_WEIGHTS = -1
"""`RolloutEngine.weights_version` before any weights are loaded."""
CHECKPOINT_VERSION = 0
"""`RolloutEngine.weights_version` after loading a model directory; a learner's exports count from 1."""


class SamplingParamsError(RllibLLMError, ValueError):
    """Sampling parameters that make no sense; lists all of them."""


class PromptError(RllibLLMError, ValueError):
    """Prompts that cannot be generated from: empty, too long for the context, or ids outside the
    vocabulary."""


class EngineUnavailableError(RllibLLMError, InputError, ImportError):
    """The asked engine is not installed. There is no fallback: another engine computes other numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; names and meaning follow vLLM's SamplingParams.

    Log-probs are those of the distribution sampled from: logits / temperature, then `top_k`, then `top_p`,
    renormalised. At ``temperature == 0`` the most likely token is taken (the lowest id of equals); the
    distribution sampled from is a point mass whose log-prob 0 says nothing, so the log-prob of the token at
    temperature 1 without truncation is reported.
    """

    n: int = 1
    """Completions per prompt; the prompt is prefilled once."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens (and all that equal the k-th); 0 keeps all."""
    max_tokens: int = 64
    """Most new tokens of one completion; the end of the model's context also ends it, as "length"."""
    min_tokens: int = 0
    """The first so many new tokens end nothing: end-of-sequence and stop ids have probability 0, stop strings that one
    of them completes do not count."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, besides the model's end-of-sequence ids; the id is the completion's last
    token."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion once they appear in its text; the token that completes one is kept.
    Needs a tokenizer."""
    seed: int | None = None
    """None draws a fresh seed. The same seed gives the same tokens whatever else is in the batch."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids (`stop_token_ids` still stop)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        rules = {
            f"n={self.n}: must be >= 1": self.n >= 1,
            f"temperature={self.temperature}: must be finite and >= 0": math.isfinite(self.temperature)
            and self.temperature >= 0,
            f"top_p={self.top_p}: must be in (0, 1]": 0 < self.top_p <= 1,
            f"top_k={self.top_k}: must be >= 0 (0 keeps all)": self.top_k >= 0,
            f"max_tokens={self.max_tokens}: must be >= 1": self.max_tokens >= 1,
            f"min_tokens={self.min_tokens}: must be in [0, max_tokens={self.max_tokens}]": 0
            <= self.min_tokens
            <= self.max_tokens,
            f"stop={self.stop!r}: an empty string would stop at once": all(self.stop),
            f"stop_token_ids={self.stop_token_ids}: ids are >= 0": all(t >= 0 for t in self.stop_token_ids),
            f"seed={self.seed}: must be >= 0": self.seed is None or self.seed >= 0,
        }
        broken = [text for text, holds in rules.items() if not holds]
        if broken:
            raise SamplingParamsError(
                "sampling parameters refused:\n" + "\n".join(f"  - {b}" for b in broken)
            )


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: int64 [L], the stop token included.
        logprobs: float32 [L], natural log, of the distribution sampled from (see `SamplingParams`).
        finish_reason: "stop" (end-of-sequence, stop id or stop string) or "length".
        weights_version: version of the weights that every one of these tokens was sampled with.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    weights_version: int


@dataclass(frozen=True)
class StepSize:
    """Most sequences that one step of an engine decodes, and most tokens of one step."""

    sequences: int
    tokens: int


class RolloutEngine(ABC):
    """Generates completions with weights of a known version. One caller at a time."""

    max_model_len: int
    """Context in tokens: prompt, answers and observations of one sequence together."""

    @classmethod
    @abstractmethod
    def largest_step(cls, options: Mapping[str, Any]) -> StepSize:
        """How large a step can be of an engine that is made with these options of its constructor."""

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Version of the weights in use; `NO_WEIGHTS` before the first, `CHECKPOINT_VERSION` from a model
        directory."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """Sample `params.n` completions for each prompt.

        Args:
            prompts: token ids, one list per prompt.
            params: sampling parameters, the same for all.
            seeds: one seed per prompt, instead of ``(params.seed, index of the prompt)``; completions of a
                prompt then do not depend on its place in the list.

        Returns:
            ``result[p][i]`` is completion i of prompt p.

        Raises:
            PromptError: lists every prompt that cannot be used; nothing is generated.
            EngineError: no weights yet, asleep, closed, or non-finite logits.
        """

    @abstractmethod
    def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[int]:
        """Begin to sample as `generate` does, and return at once: requests may come and end unevenly.

        A request's completions are those that `generate` gives for the same prompt and seed. While requests are
        pending, further ones need the same `params` (but for `seed`), and `generate`, `update_weights` and `sleep` are
        refused: every token of a completion is of one version.

        Returns:
            One id per prompt, for `collect` and `abort`.

        Raises:
            PromptError, SamplingParamsError: as of `generate`; no request is begun.
            EngineError: as of `generate`, or sampling failed; all pending requests are lost.
        """

    @abstractmethod
    def collect(self, timeout_s: float) -> dict[int, list[Completion]]:
        """Completions of requests that have ended since the last call, by id.

        Returns as soon as one request has all its completions, or with nothing after `timeout_s` seconds or when
        nothing is pending. vLLM goes on sampling between calls; the embedded engine samples during calls only.

        Raises:
            EngineError: sampling failed; all pending requests are lost.
        """

    @abstractmethod
    def abort(self, requests: Sequence[int] | None = None) -> list[int]:
        """End pending requests (None: all) without completions; the ids of those that were ended.

        Ids that are not pending, because their completions were collected, are passed over.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop sampling until `resume`; pending requests keep the tokens, keys and values that they have. Idempotent.

        A request that was paused ends with the tokens and log-prob bits that it would have had anyway. Meanwhile
        `collect` returns what had ended and does not wait, `submit` only queues, `abort` works, `generate` is refused.
        No request outlives an update: `update_weights` refuses while some are pending, and names them. Abort them, and
        submit their prompts anew: every token of a completion is of one version.
        """

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`. Idempotent."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests that were submitted and neither collected nor aborted."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where the weights are: what a transport is chosen by."""

    @abstractmethod
    def update_weights(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        """Verify, then replace all weights; cached prefixes are dropped.

        Args:
            update: the weights in host memory, or of a learner in this process, or an offer of a learner that sends
                meanwhile (`rllib_llm.sync.stream`).

        Raises:
            WeightSyncError: lists every violation, or says why nothing arrived; the engine goes on with what it held.
            EngineError: the update broke off after a part of it was applied; the engine has `NO_WEIGHTS` until the
                next one.
        """

    def holds_base(self, base: str) -> bool:
        """Whether `update_weights` would take adapters alone that are on the base of this hash (`rllib_llm.sync.base`).

        An engine that knows no such updates holds none.
        """
        return False

    @abstractmethod
    def attest(self) -> Attestation:
        """What this engine runs with, gathered in its own process, with hashes of the weights it holds."""

    def peak_memory(self) -> dict[str, float]:
        """GiB that the process of the engine has taken at most (`rllib_llm.process.memory.peak_memory`).

        An engine in a process of its own overrides it.
        """
        return peak_memory()

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Free GPU memory until `wake`, for a learner on the same GPU.

        Level 1 drops the KV cache and parks the weights in host memory; level 2 drops both, and the engine then needs
        an update.

        Raises:
            EngineError: requests are pending, or this engine cannot give memory back.
        """

    @abstractmethod
    def wake(self) -> None:
        """Undo `sleep`; after level 2 the engine has `NO_WEIGHTS` until the next update."""

    def alive(self) -> bool:
        """False when the engine cannot go on: closed, or the process that it runs in has ended.

        An engine in a process of its own overrides it.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Free everything; further calls raise EngineError. Idempotent."""

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
