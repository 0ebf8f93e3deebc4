"""Sampling in the embedded engine: admission, chunked prefill with shared prefixes, decode, slots.

Continuous batching: sequences occupy slots 0..A-1 of the KV cache; one that ends leaves at once, the last
one moves into its slot, and waiting ones are admitted. A prompt is prefilled once into a staging slot, its
`n` completions copy the prefix from there. Which sequences run together never changes a result: the model's
operators are row-invariant and every sequence draws from its own stream
(`rllib_llm.engines.sampler.sequence_uniforms`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rllib_llm.engines.base import Completion, FinishReason, SamplingParams
from rllib_llm.engines.sampler import sample, sequence_uniforms
from rllib_llm.engines.stopping import StopRule
from rllib_llm.errors import EngineError
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.kv_cache import DecoderCache


@dataclass(frozen=True)
class Limits:
    """Bounds of one run: running sequences, staged prompts, tokens of one prefill forward, context length
    in tokens."""

    sequences: int
    staged: int
    prefill_tokens: int
    context: int


@dataclass
class _Running:
    """A sequence that is being decoded; its slot is its index in `Generation.active`."""

    prompt: int
    child: int
    length: int  # tokens of prompt and answer so far; all but the newest are in the cache
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Staged:
    """A prefilled prompt in staging slot `slot`, with the children that are still to start."""

    prompt: int
    slot: int
    logits: torch.Tensor  # fp32 [1, V] after the last prompt token
    children: deque[int]


class Generation:
    """Prompts that are sampled together; all at once (`run`), or coming and going between steps."""

    def __init__(
        self,
        model: CausalLM,
        cache: DecoderCache,
        limits: Limits,
        params: SamplingParams,
        stop_rule: StopRule,
        weights_version: int,
    ) -> None:
        self.model, self.cache, self.limits, self.params = model, cache, limits, params
        self.prompts: dict[int, torch.Tensor] = {}
        self.seeds: dict[int, Sequence[int]] = {}
        self.stop_rule, self.version = stop_rule, weights_version
        self.waiting: deque[int] = deque()
        self.staged: deque[_Staged] = deque()
        self.active: list[_Running] = []
        self.device = cache.device
        self.uniforms = torch.zeros(
            limits.sequences, params.max_tokens, dtype=torch.float64, device=self.device
        )
        self.results: dict[int, list[Completion | None]] = {}
        self._next = 0

    def add(self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]]) -> list[int]:
        """Queue prompts; their numbers, which count from 0."""
        numbers = list(range(self._next, self._next + len(prompts)))
        self._next += len(prompts)
        for number, prompt, seed in zip(numbers, prompts, seeds, strict=True):
            self.prompts[number] = torch.as_tensor(prompt, dtype=torch.int64)
            self.seeds[number] = seed
            self.results[number] = [None] * self.params.n
        self.waiting.extend(numbers)
        return numbers

    def run(self) -> list[list[Completion]]:
        """All completions, ``[prompt][child]``."""
        done: dict[int, list[Completion]] = {}
        while self.busy:
            self.step()
            done |= self.take_finished()
        return [done[number] for number in sorted(done)]

    @property
    def busy(self) -> bool:
        """Something is left to sample."""
        return bool(self.waiting or self.staged or self.active)

    def step(self) -> None:
        """Admit as many prompts as fit, and sample one token of every running sequence."""
        self._admit()
        if self.active:
            self._decode_step()

    def take_finished(self) -> dict[int, list[Completion]]:
        """Prompts that have all their completions; they are forgotten here."""
        finished = {}
        for number, row in self.results.items():
            complete = [c for c in row if c is not None]
            if len(complete) == self.params.n:
                finished[number] = complete
        for number in finished:
            self._forget(number)
        return finished

    def drop(self, number: int) -> None:
        """End a prompt's sequences without completions."""
        if number in self.waiting:
            self.waiting.remove(number)
        self.staged = deque(s for s in self.staged if s.prompt != number)
        self._vacate([slot for slot, sequence in enumerate(self.active) if sequence.prompt == number])
        self._forget(number)

    def _forget(self, number: int) -> None:
        del self.results[number], self.prompts[number], self.seeds[number]

    # ------------------------------------------------------------------ admission and prefill

    def _admit(self) -> None:
        while len(self.active) < self.limits.sequences and (self.staged or self.waiting):
            if not self.staged:
                self._stage()
            self._start_children()

    def _stage(self) -> None:
        """Prefill as many waiting prompts as the free slots can use (and the staging slots hold)."""
        free = self.limits.sequences - len(self.active)
        wanted = min(-(-free // self.params.n), self.limits.staged, len(self.waiting))
        indices = [self.waiting.popleft() for _ in range(wanted)]
        first = self.limits.sequences
        hidden = self._prefill(indices, [first + i for i in range(wanted)])
        logits = self.model.logits(hidden)
        for i, prompt in enumerate(indices):
            self.staged.append(_Staged(prompt, first + i, logits[i : i + 1], deque(range(self.params.n))))

    def _prefill(self, indices: list[int], slots: list[int]) -> torch.Tensor:
        """Run prompts through the model in packed chunks of at most `prefill_tokens` tokens; [len(indices),
        H] of the last token of each."""
        last: dict[int, torch.Tensor] = {}
        pieces: list[tuple[int, int, int]] = []  # (which, start, stop)
        budget = self.limits.prefill_tokens
        for which, prompt in enumerate(indices):
            start, length = 0, len(self.prompts[prompt])
            while start < length:
                stop = min(length, start + budget)
                pieces.append((which, start, stop))
                budget -= stop - start
                start = stop
                if budget == 0:
                    self._prefill_chunk(pieces, indices, slots, last)
                    pieces, budget = [], self.limits.prefill_tokens
        if pieces:
            self._prefill_chunk(pieces, indices, slots, last)
        return torch.stack([last[which] for which in range(len(indices))])

    def _prefill_chunk(
        self,
        pieces: list[tuple[int, int, int]],
        indices: list[int],
        slots: list[int],
        last: dict[int, torch.Tensor],
    ) -> None:
        batch = PackedBatch.from_pieces(
            [(self.prompts[indices[which]][start:stop], start) for which, start, stop in pieces]
        )
        hidden = self.model(batch.to(self.device), self.cache.view([slots[which] for which, _, _ in pieces]))
        ends = np.cumsum([stop - start for _, start, stop in pieces]) - 1
        for (which, _, stop), end in zip(pieces, ends, strict=True):
            if stop == len(self.prompts[indices[which]]):
                last[which] = hidden[int(end)]

    def _start_children(self) -> None:
        """Give each staged child a slot and its first token, while there are slots."""
        entries: list[tuple[_Staged, int]] = []
        free = self.limits.sequences - len(self.active)
        while self.staged and len(entries) < free:
            head = self.staged[0]
            entries.append((head, head.children.popleft()))
            if not head.children:
                self.staged.popleft()
        first_slot = len(self.active)
        sources = []
        for slot, (head, child) in enumerate(entries, first_slot):
            length = len(self.prompts[head.prompt])
            self.active.append(_Running(head.prompt, child, length))
            draws = sequence_uniforms([*self.seeds[head.prompt], child], self.params.max_tokens)
            self.uniforms[slot] = torch.from_numpy(draws)
            sources.append(head.slot)
        self.cache.copy_rows(sources, list(range(first_slot, first_slot + len(entries))))
        logits = torch.cat([head.logits for head, _ in entries])
        self._take_tokens(logits, first_slot)

    # ------------------------------------------------------------------ decode

    def _decode_step(self) -> None:
        tokens = torch.tensor([s.token_ids[-1] for s in self.active], dtype=torch.int64)
        positions = torch.tensor([s.length - 1 for s in self.active], dtype=torch.int64)
        batch = PackedBatch.decode(tokens, positions).to(self.device)
        hidden = self.model(batch, self.cache.view_first())
        self._take_tokens(self.model.logits(hidden), 0)

    def _take_tokens(self, logits: torch.Tensor, first_slot: int) -> None:
        """Sample one token for each sequence in slots first_slot.., append it, and let finished sequences
        leave."""
        running = self.active[first_slot:]
        counts = torch.tensor([len(s.token_ids) for s in running], device=self.device)
        slots = torch.arange(first_slot, len(self.active), device=self.device)
        uniforms = self.uniforms[slots, counts]
        params = self.params
        banned_ids = self.stop_rule.stop_ids if params.min_tokens else ()
        ids, logprobs = sample(
            logits,
            uniforms,
            params.temperature,
            params.top_k,
            params.top_p,
            banned_ids,
            counts < params.min_tokens,
        )
        if not bool(torch.isfinite(logprobs).all()):
            self._raise_not_finite(running, logprobs)
        finished: list[tuple[int, FinishReason]] = []
        for slot, token, logprob in zip(
            range(first_slot, len(self.active)), ids.tolist(), logprobs.tolist(), strict=True
        ):
            sequence = self.active[slot]
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.length += 1
            reason = self.stop_rule.check(sequence.token_ids, self.limits.context - sequence.length)
            if reason is not None:
                finished.append((slot, reason))
        self._leave(finished)

    def _leave(self, finished: list[tuple[int, FinishReason]]) -> None:
        """Store finished sequences and free their slots."""
        for slot, reason in finished:
            sequence = self.active[slot]
            self.results[sequence.prompt][sequence.child] = Completion(
                np.asarray(sequence.token_ids, dtype=np.int64),
                np.asarray(sequence.logprobs, dtype=np.float32),
                reason,
                self.version,
            )
        self._vacate([slot for slot, _ in finished])

    def _vacate(self, slots: list[int]) -> None:
        """Remove sequences and close the gaps, from the highest slot down so that indices stay valid."""
        for slot in reversed(slots):
            tail = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = tail
                self.cache.copy_rows([len(self.active)], [slot])
                self.uniforms[slot] = self.uniforms[len(self.active)]

    def _raise_not_finite(self, running: list[_Running], logprobs: torch.Tensor) -> None:
        bad = [s for s, ok in zip(running, torch.isfinite(logprobs).tolist(), strict=True) if not ok]
        where = ", ".join(f"prompt {s.prompt} completion {s.child} token {len(s.token_ids)}" for s in bad[:5])
        raise EngineError(
            f"{len(bad)} of {len(running)} log-probs are not finite (first: {where}) with weights version "
            f"{self.version}: {self._cause()}"
        )

    def _cause(self) -> str:
        """Why log-probs are not finite: the weights are not, or they are and the forward pass overflows."""
        wrong = [
            name
            for name, weight in self.model.named_parameters()
            if weight.is_floating_point() and not bool(torch.isfinite(weight.float()).all())
        ]
        if wrong:
            return (
                f"{len(wrong)} weights hold inf or NaN (first: {wrong[0]}). The file of the model has them, or an "
                "update with a train.lr that is too high has made them; go on from an earlier "
                "checkpoint with a lower one"
            )
        return (
            "all weights are finite, so the forward pass overflows: a format of the precision policy is too narrow for "
            f"this model, or the temperature ({self.params.temperature:g}) is too low"
        )
