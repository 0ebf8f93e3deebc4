"""The tokens that both sides of a comparison compute, and how each side computes them while being traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rllib_llm.engines.base import RolloutEngine, SamplingParams
from rllib_llm.mismatch.trace import Recorder, Site, Trace
from rllib_llm.models import CausalLM, DecoderCache, PackedBatch
from rllib_llm.sync.export import export_weights

ENGINE_SITE = "engine.log_probs"
"""The log-probs that the engine reported when it sampled, beside those of its traced replay."""


@dataclass(frozen=True)
class Sample:
    """One sequence: prompt ids (at least one), answer ids, fp32 [len(answer)] log-probs that the engine reported."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    reported: np.ndarray | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Token:
    """Where a row stands: index of its prompt, position in the sequence, and which of the two parts that is."""

    prompt: int
    position: int
    part: Literal["prompt", "answer"]

    def __str__(self) -> str:
        return f"prompt {self.prompt}, position {self.position} ({self.part})"


@dataclass(frozen=True)
class Workload:
    """Sequences laid end to end; row r is token r of that line. Log-probs are of `temperature`, untruncated."""

    samples: tuple[Sample, ...]
    temperature: float = 1.0

    @classmethod
    def prompts_only(cls, prompts: Sequence[Sequence[int]]) -> Workload:
        """Prefill only: nothing is sampled, every prompt token but the first of each is scored."""
        return cls(tuple(Sample(tuple(p)) for p in prompts))

    @classmethod
    def sampled(
        cls, engine: RolloutEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Workload:
        """The engine's own answers, `params.n` per prompt; their tokens are scored."""
        samples = [
            Sample(tuple(prompt), tuple(c.token_ids.tolist()), c.logprobs)
            for prompt, completions in zip(prompts, engine.generate(prompts, params), strict=True)
            for c in completions
        ]
        return cls(tuple(samples), params.temperature)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Row of the first token of each sample, and the number of all rows."""
        return tuple(accumulate((len(s.ids) for s in self.samples), initial=0))

    @cached_property
    def scored(self) -> Tensor:
        """int64 [n], rows whose next token has a log-prob to compare: those of answers, or of prompts alone."""
        rows: list[int] = []
        for start, sample in zip(self.starts[:-1], self.samples, strict=True):
            first = len(sample.prompt) - 1 if sample.answer else 0
            rows += range(start + first, start + len(sample.ids) - 1)
        return torch.tensor(rows, dtype=torch.int64)

    @cached_property
    def targets(self) -> Tensor:
        """int64 [rows], the token after each row (meaningless for the last of a sample)."""
        return torch.tensor([i for s in self.samples for i in s.ids], dtype=torch.int64).roll(-1)

    def token(self, row: int) -> Token:
        """Where row `row` stands."""
        index = max(i for i, start in enumerate(self.starts[:-1]) if start <= row)
        position = row - self.starts[index]
        return Token(index, position, "prompt" if position < len(self.samples[index].prompt) else "answer")


def trace_learner(model: CausalLM, workload: Workload, training: bool = False) -> Trace:
    """The learner's side (side "train"): one packed forward of whole sequences, log-probs of the scored rows.

    training: as a training step computes them, with the operators that keep what its backward needs; else as the
    learner scores, without gradients.
    """
    recorder = Recorder(model)
    device = model.model.embed_tokens.weight.device
    batch = PackedBatch.from_sequences([s.ids for s in workload.samples]).to(device)
    with torch.set_grad_enabled(training):
        with recorder.forward(torch.arange(workload.starts[-1])):
            hidden = model(batch)
        _score(model, recorder, hidden[workload.scored.to(device)], workload.scored, workload)
    trace = recorder.trace
    if training:
        return trace
    _describe(trace, model)
    trace.weights = dict(export_weights(model, 1).hashes)
    if any(s.reported is not None for s in workload.samples) and "log_probs" in trace.sites:
        trace.sites[ENGINE_SITE] = trace.sites["log_probs"]
    return trace


def trace_rollout(model: CausalLM, workload: Workload, *, max_prefill_tokens: int = 4096) -> Trace:
    """The embedded engine's side (side "rollout"): chunked prefill into a KV cache, then decode token by token.

    Answers are fed as they are (teacher forcing), with the engine's batch shapes: prompts packed to at most
    `max_prefill_tokens` per forward, all unfinished sequences in one decode step, logits of the last prompt tokens
    together. What the engine itself reported stands beside it as `ENGINE_SITE`.
    """
    recorder = Recorder(model)
    with torch.no_grad():
        _Replay(model, recorder, workload, max_prefill_tokens).run()
    trace = recorder.trace
    _describe(trace, model)
    trace.weights = model.weight_hashes()
    reported = [s.reported for s in workload.samples if s.reported is not None]
    if reported:
        values = torch.from_numpy(np.concatenate(reported))
        site = trace.sites[ENGINE_SITE] = Site("generate", "", {}, [len(values)])
        site.add("", workload.scored, values)
    return trace


def _describe(trace: Trace, model: CausalLM) -> None:
    for row in model.plan.modules:
        trace.formats[row.name] = row.train_forward if model.side == "train" else row.rollout_forward


def _score(model: CausalLM, recorder: Recorder, hidden: Tensor, rows: Tensor, workload: Workload) -> None:
    if len(rows):
        targets = workload.targets[rows].to(hidden.device)
        with recorder.scoring(rows):
            model.token_logprobs(hidden, targets, workload.temperature)


class _Replay:
    """Prefill and decode of one workload; sequences take cache slots by falling length of their answers, so that
    those still decoding are always the first."""

    def __init__(self, model: CausalLM, recorder: Recorder, workload: Workload, budget: int) -> None:
        self.model, self.recorder, self.workload, self.budget = model, recorder, workload, budget
        self.order = sorted(
            range(len(workload.samples)), key=lambda i: len(workload.samples[i].answer), reverse=True
        )
        self.device = model.model.embed_tokens.weight.device
        capacity = max(len(s.ids) for s in workload.samples)
        self.cache = DecoderCache(
            model.architecture, len(self.order), capacity, model.compute_dtype, self.device, max_bytes=4 << 30
        )

    def run(self) -> None:
        self._prefill()
        for step in range(1, len(self.workload.samples[self.order[0]].answer)):
            self._decode(step)

    def _prefill(self) -> None:
        pending: list[tuple[int, int, int]] = []  # (slot, start, stop) of the prompt in that slot
        budget = self.budget
        hidden: list[Tensor] = []
        rows: list[Tensor] = []
        for slot, index in enumerate(self.order):
            start, length = 0, len(self.workload.samples[index].prompt)
            while start < length:
                stop = min(length, start + budget)
                pending.append((slot, start, stop))
                budget, start = budget - (stop - start), stop
                if budget == 0:
                    self._prefill_chunk(pending, hidden, rows)
                    pending, budget = [], self.budget
        if pending:
            self._prefill_chunk(pending, hidden, rows)
        _score(self.model, self.recorder, torch.cat(hidden), torch.cat(rows), self.workload)

    def _prefill_chunk(self, pieces: list[Any], hidden: list[Tensor], rows: list[Tensor]) -> None:
        ids = [self._ids(slot)[start:stop] for slot, start, stop in pieces]
        batch = PackedBatch.from_pieces(
            [(torch.tensor(i), start) for i, (_, start, _) in zip(ids, pieces, strict=True)]
        )
        here = torch.cat([torch.arange(start, stop) + self._first_row(slot) for slot, start, stop in pieces])
        with self.recorder.forward(here):
            out = self.model(batch.to(self.device), self.cache.view([slot for slot, _, _ in pieces]))
        kept = torch.isin(here, self.workload.scored)
        hidden.append(out[kept.to(self.device)])
        rows.append(here[kept])

    def _decode(self, step: int) -> None:
        """Feed token `step` - 1 of every answer longer than `step`; its row predicts token `step`."""
        active = [slot for slot, i in enumerate(self.order) if len(self.workload.samples[i].answer) > step]
        places = [len(self.workload.samples[self.order[slot]].prompt) + step - 1 for slot in active]
        ids = [self._ids(slot)[place] for slot, place in zip(active, places, strict=True)]
        rows = torch.tensor([self._first_row(s) + place for s, place in zip(active, places, strict=True)])
        batch = PackedBatch.decode(torch.tensor(ids), torch.tensor(places)).to(self.device)
        with self.recorder.forward(rows):
            hidden = self.model(batch, self.cache.view_first())
        _score(self.model, self.recorder, hidden, rows, self.workload)

    def _ids(self, slot: int) -> tuple[int, ...]:
        return self.workload.samples[self.order[slot]].ids

    def _first_row(self, slot: int) -> int:
        return self.workload.starts[self.order[slot]]
