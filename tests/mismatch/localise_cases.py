"""Two sides for the bisecting tool: a learner's model, an engine with its weights, and what is fed to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from precision_kernels import Implementation, bind
from precision_kernels.dispatch import table
from rllib_llm.engines import SamplingParams
from rllib_llm.mismatch.localise import Localisation, compare_traces
from rllib_llm.mismatch.workload import Workload, trace_learner, trace_rollout
from tests.engines.cases import engine_of
from tests.models.cases import make_model, random_sequences

LENGTHS = (1, 17, 5)


@contextmanager
def bound(operator: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another implementation of one operator on the CPU, for one phase."""
    before = table("cpu")[operator]
    bind(operator, "cpu", Implementation(f"tests.{operator}", "1", function))
    try:
        yield
    finally:
        bind(operator, "cpu", before)


def make_pair(kind: str, policy: Any) -> tuple[Any, Any]:
    """(learner's model, embedded engine with its weights)."""
    model = make_model(kind, policy)
    return model, engine_of(model)


def sampled(engine: Any, new_tokens: int = 5, **options: Any) -> Workload:
    prompts = random_sequences(LENGTHS, engine.model.architecture.vocab)
    return Workload.sampled(engine, prompts, SamplingParams(max_tokens=new_tokens, seed=3, **options))


def compared(model: Any, engine: Any, workload: Workload, **options: Any) -> Localisation:
    return compare_traces(
        trace_learner(model, workload), trace_rollout(engine.model, workload, **options), workload
    )
