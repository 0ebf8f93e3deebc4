"""Records what every operator of a model computed, one side at a time.

Each side is recorded where it lives (another process, another phase of this one); the two `Trace`s are compared
afterwards by `rllib_llm.mismatch.localise`. Rows carry the number of their token in the whole workload, so a side
that prefills in chunks and decodes token by token can be held against one packed forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precision_kernels import FP8, Implementation
from precision_kernels.dispatch import observed
from rllib_llm.errors import RllibLLMError
from rllib_llm.mismatch.program import KINDS, QUANTISERS, Reading, Step, body, head, results, settings
from rllib_llm.models import CausalLM


class TraceError(RllibLLMError, RuntimeError):
    """A model called its operators in another order than `rllib_llm.mismatch.program` says."""


@dataclass
class Site:
    """One place in the model: who computed there, and what, for some rows.

    operator, implementation: dispatched name and "name@version#hash" ("" for values made outside of the dispatch).
    settings: see `program.settings`. row_counts: rows of each call. parts: part -> [(int64 [n] rows, values
    [n, ...] on the CPU)]; e4m3 codes are kept as uint8, because torch 2.13 cannot unpickle a float8 tensor.
    """

    operator: str
    implementation: str
    settings: dict[str, str]
    row_counts: list[int] = field(default_factory=list)
    parts: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, part: str, rows: Tensor, values: Tensor) -> None:
        """Keep `values` [n, ...] (CPU, owned by this site from now on) of int64 [n] `rows`."""
        self.dtypes[part] = values.dtype
        stored = values.view(torch.uint8) if values.dtype == FP8 else values
        self.parts.setdefault(part, []).append((rows, stored))

    def values(self, part: str) -> tuple[Tensor, Tensor]:
        """(int64 [n] rows in ascending order, their values [n, ...])."""
        rows = torch.cat([rows for rows, _ in self.parts[part]])
        order = rows.argsort()
        values = torch.cat([values for _, values in self.parts[part]])[order]
        return rows[order], values.view(self.dtypes[part])


@dataclass
class Trace:
    """One side's record: sites in order of computation, formats of the linears, hashes of the weights it holds."""

    sites: dict[str, Site] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Fills a `Trace` from forwards of one model, each announced with the rows it computes.

    Keeps a copy of every output of every operator on the CPU: a tool for a few hundred tokens.
    """

    def __init__(self, model: CausalLM) -> None:
        self.trace = Trace()
        self._body, self._head = body(model.architecture, model.plan), head()
        self._program: tuple[Step, ...] = ()
        self._done = self._taken = 0
        self._quantiser = ("", "")
        self._rows = torch.empty(0, dtype=torch.int64)

    @contextmanager
    def forward(self, rows: Tensor) -> Iterator[None]:
        """Around one ``model(batch)``; rows int64 [T], one per token of the batch."""
        with self._recording(self._body, rows):
            yield
        if self._done != len(self._body):
            raise TraceError(
                f"the forward stopped before {self._body[self._done].site}: {self._done} of {len(self._body)} "
                "operators were called; a replayed CUDA graph or a compiled model cannot be traced"
            )

    @contextmanager
    def scoring(self, rows: Tensor) -> Iterator[None]:
        """Around one ``model.token_logprobs(hidden, ...)``, which may chunk; rows int64 [n], one per row of hidden."""
        with self._recording(self._head, rows):
            yield

    @contextmanager
    def _recording(self, program: tuple[Step, ...], rows: Tensor) -> Iterator[None]:
        self._program, self._rows, self._done, self._taken = program, rows.cpu(), 0, 0
        with observed(self._see):
            yield

    def _see(self, operator: str, chosen: Implementation, arguments: tuple[Any, ...], result: Any) -> None:
        if operator in QUANTISERS:
            self._quantiser = (operator, chosen.identity)
        kind = KINDS.get(operator)
        if kind is None:
            return
        if self._done == len(self._program) and self._program is self._head:  # the next chunk of rows
            self._done = 0
        expected = self._program[self._done] if self._done < len(self._program) else None
        if expected is None or expected.kind != kind:
            place = "the end" if expected is None else f"{expected.kind} of {expected.site}"
            raise TraceError(
                f"operator {operator} was called where the program has {place}: CausalLM calls its operators in "
                "another order than rllib_llm/mismatch/program.py says"
            )
        self._done += 1
        tensors = results(operator, result)
        count = next(iter(tensors.values())).shape[0]
        for reading in expected.reads:
            self._keep_reading(reading, arguments, count)
        for name, part in expected.split(tensors):
            site = self._site(name, operator, chosen.identity, settings(operator, arguments))
            self._keep(site, dict(part), count)
        if self._done == len(self._program):
            self._taken += count

    def _keep_reading(self, reading: Reading, arguments: tuple[Any, ...], count: int) -> None:
        if tensors := reading.read(arguments):
            made_by = self._quantiser if reading.operator in QUANTISERS else (reading.operator, "")
            found = settings(reading.operator, arguments)
            self._keep(self._site(reading.site, *made_by, found), dict(tensors), count)

    def _site(self, name: str, operator: str, identity: str, found: dict[str, str]) -> Site:
        if name not in self.trace.sites:
            self.trace.sites[name] = Site(operator, identity, found)
        return self.trace.sites[name]

    def _keep(self, site: Site, tensors: dict[str, Tensor], count: int) -> None:
        rows = self._rows[self._taken : self._taken + count]
        site.row_counts.append(count)
        for part, tensor in tensors.items():
            if tensor.shape[0] != len(rows):
                raise TraceError(f"{site.operator} returned {tensor.shape[0]} rows for {len(rows)} tokens")
            # to() of a CPU tensor is no copy, and buffers are reused between decode steps.
            site.add(part, rows, tensor.detach().to("cpu", copy=True).contiguous())
