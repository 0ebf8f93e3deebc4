"""Decodes a fixed batch with one CUDA graph per step, so that the cells of a study share a GPU instead of queueing.

A small model at batch 128 is bound by launches: twelve engines in twelve processes take turns on the GPU, and a
Python scheduler costs milliseconds a step. Here every cell replays its own graph on its own stream, and the GPU runs
them side by side. What is computed is what `rllib_llm.engines` compute: the rollout side's `CausalLM`, weights from a
verified `WeightUpdate`, attention by the bound operator on a paged cache, log-probs by the shared log-softmax. On a
device without graphs the same step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from precision_kernels import log_softmax, rotary_cos_sin
from rllib_llm.models import CausalLM, DecoderCache, PackedBatch

PAGE = 16
"""Tokens of a page of the CUDA cache (kernels/hopper/flash_attention.py)."""
CHECK_EVERY = 64
"""Steps between two looks at whether every sequence has ended: each look waits for the GPU."""


@dataclass(frozen=True)
class Sample:
    """prompts int64 [n, P]; completions and logprobs: n * group arrays [L], those of one prompt adjacent."""

    prompts: np.ndarray
    group: int
    completions: list[np.ndarray]
    logprobs: list[np.ndarray]
    ended: np.ndarray
    """bool [n * group]: by <eos>, not by the token limit"""


class _Decoding:
    """What the layers share in a decode step, with the sizes that a graph holds fixed."""

    def __init__(self, sampler: Sampler) -> None:
        self.positions, self.table, self.layout = sampler.position, sampler.table, None


class Sampler:
    """`rows` sequences of at most `capacity` tokens on the rollout side `model`; temperature 1, no truncation."""

    def __init__(self, model: CausalLM, rows: int, capacity: int, device: torch.device, eos: int) -> None:
        if model.side != "rollout":
            raise ValueError(f"Sampler needs a model of side 'rollout', got {model.side!r}")
        self.model, self.rows, self.device, self.eos = model, rows, device, eos
        self.capacity = -(-capacity // PAGE) * PAGE
        arch = model.architecture
        self.cache = DecoderCache(arch, rows, self.capacity, model.compute_dtype, device, 1 << 50)
        self.table = rotary_cos_sin(
            arch.rope.inverse_frequencies(arch.head_dim).to(device),
            self.capacity,
            model.compute_dtype,
            arch.rope.attention_factor,
        )
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(self.capacity, rows, dtype=torch.float64, device=device)
        self.ids = torch.zeros(self.capacity, rows, dtype=torch.int64, device=device)
        self.logp = torch.zeros(self.capacity, rows, dtype=torch.float32, device=device)
        self.graph: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = torch.cuda.graph_pool_handle()
            self._decoding = _Decoding(self)
            self._give_layers_static_attention()

    # ------------------------------------------------------------------ one batch

    @torch.no_grad()
    def begin(self, prompts: np.ndarray, group: int, limit: int, seed: Sequence[int]) -> None:
        """Prefill int64 [n, P] prompts, `group` answers of at most `limit` tokens each; n * group = rows."""
        n, width = prompts.shape
        if n * group != self.rows or width + limit > self.capacity:
            raise ValueError(
                f"{n} prompts x {group} answers of {width} + {limit} tokens do not fit {self.rows} rows of "
                f"{self.capacity} tokens"
            )
        self.prompts, self.group, self.limit, self.taken = prompts, group, limit, 0
        generator = torch.Generator(self.device).manual_seed(
            int(np.random.SeedSequence(seed).generate_state(1)[0])
        )
        self.uniforms[:limit] = torch.rand(
            limit, self.rows, dtype=torch.float64, device=self.device, generator=generator
        )
        heads = list(range(0, self.rows, group))
        # The last prompt token is the first decode step's input.
        packed = PackedBatch.from_sequences(list(torch.from_numpy(prompts[:, :-1]))).to(self.device)
        self.model(packed, self.cache.view(heads))
        copies = [row for row in range(self.rows) if row % group]
        if copies:
            self.cache.copy_rows([row - row % group for row in copies], copies)
        self.token.copy_(torch.from_numpy(prompts[:, -1].repeat(group)))
        self.position.fill_(width - 1)
        self.step.zero_()
        self.done.zero_()
        if self.device.type == "cuda":
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._step()  # compiles what is not compiled yet, which a capture must not
                self._capture()
            self.taken = 1

    @torch.no_grad()
    def advance(self) -> None:
        """One more token of every sequence; ended ones go on and are cut later."""
        if self.graph is None:
            self._step()
        else:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.taken += 1

    @property
    def finished(self) -> bool:
        """Whether nothing is left to decode; waits for this sampler's stream."""
        if self.taken >= self.limit:
            return True
        if self.device.type != "cuda":
            return bool(self.done.all())
        with torch.cuda.stream(self.stream):
            return bool(self.done.all())

    def finish(self) -> Sample:
        """The batch, each answer cut behind its <eos>."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().wait_stream(self.stream)
        ids, logp = (t[: self.taken].t().cpu().numpy() for t in (self.ids, self.logp))
        if not np.isfinite(logp).all():
            raise FloatingPointError(f"{int((~np.isfinite(logp)).sum())} sampled log-probs are not finite")
        is_end = ids == self.eos
        ended = is_end.any(axis=1)
        lengths = np.where(ended, is_end.argmax(axis=1) + 1, self.taken)
        return Sample(
            self.prompts, self.group, [row[:n] for row, n in zip(ids, lengths, strict=True)],
            [row[:n] for row, n in zip(logp, lengths, strict=True)], ended,
        )  # fmt: skip

    # ------------------------------------------------------------------ one step

    def _step(self) -> None:
        logp = log_softmax(self.model.logits(self._hidden()))
        cumulative = logp.double().exp().cumsum(-1)
        uniform = self.uniforms.index_select(0, self.step).t() * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, uniform, right=True).clamp_(max=logp.shape[-1] - 1)
        self.ids.index_copy_(0, self.step, ids.t())
        self.logp.index_copy_(0, self.step, logp.gather(-1, ids).t())
        self.token.copy_(ids[:, 0])
        self.done.logical_or_(self.token == self.eos)
        self.position.add_(1)
        self.step.add_(1)

    def _hidden(self) -> torch.Tensor:
        if self.device.type != "cuda":
            return self.model(PackedBatch.decode(self.token, self.position), self.cache.view_first())
        decoder, residual = self.model.model, None
        x = decoder.embed_tokens(self.token)
        for layer, cache in zip(decoder.layers, self.cache.layers, strict=True):
            x, residual = layer(x, residual, self._decoding, cache)
        return decoder.norm.add(x, residual)[0]

    def _capture(self) -> None:
        """A new graph per batch: operands made from the weights may have moved with the last update.

        Not `torch.cuda.graph`, which empties the allocator's cache each time. The old graph lives until the new one
        is there, so that its pool does too.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._step()
        graph.capture_end()
        self.graph = graph

    def _give_layers_static_attention(self) -> None:
        """In a decode step attention reads sizes that a graph may hold fixed; the kernel is the bound one."""
        from precision_kernels.hopper import flash_attention

        rows = torch.arange(self.rows, device=self.device)
        starts = torch.arange(self.rows + 1, dtype=torch.int32, device=self.device)
        per_row = self.capacity // PAGE
        pages = (rows[:, None] * per_row + torch.arange(per_row, device=self.device)).to(torch.int32)

        def with_static(attention: Any) -> Any:
            usual = attention.attend

            def attend(q: Any, k: Any, v: Any, context: Any, cache: Any) -> torch.Tensor:
                if context is not self._decoding:
                    return usual(q, k, v, context, cache)
                cache.k[rows, self.position], cache.v[rows, self.position] = k, v
                used = (self.position + 1).to(torch.int32)
                return flash_attention.cached_op(
                    q.contiguous(), *cache.paged(), starts, 1, used, self.capacity, pages, q.shape[-1] ** -0.5
                )[0]

            return attend

        for layer in self.model.model.layers:
            layer.self_attn.attend = with_static(layer.self_attn)


def generate(
    samplers: Sequence[Sampler],
    prompts: Sequence[np.ndarray],
    group: int,
    limit: int,
    seeds: Sequence[Sequence[int]],
) -> list[Sample]:
    """One batch of every sampler, step by step together; the longest decides when all are done."""
    for sampler, batch, seed in zip(samplers, prompts, seeds, strict=True):
        sampler.begin(batch, group, limit, seed)
    running = list(samplers)
    while running:
        for sampler in running:
            if sampler.taken < limit:
                sampler.advance()
        if running[0].taken % CHECK_EVERY == 0 or running[0].taken >= limit:
            running = [s for s in running if not s.finished]
    return [sampler.finish() for sampler in samplers]
