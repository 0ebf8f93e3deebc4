"""On request: which module makes the difference between learner and env runners, on given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.env_runner import Reply
from rllib_llm.mismatch import LayerMismatch, capture, compare_captures
from rllib_llm.models import PackedBatch

if TYPE_CHECKING:
    from rllib_llm.algorithm.grpo import GRPO

__all__ = ["probe_layers"]


def probe_layers(
    algo: GRPO, sequences: Sequence[Sequence[int]], modules: Sequence[str] | None = None
) -> dict[int, list[LayerMismatch]]:
    """Module outputs of the learner against those of each env runner, by runner index, in execution order.

    Both sides run their packed forward over the same token ids (a few hundred are enough) with the weights they
    hold: after an iteration these are the same version. `mismatch.first_difference` names the module where a
    runner's side parts. Needs engines whose model is in reach (`engine="torch"`); raises RuntimeError naming the
    runner otherwise.
    """
    tokens = [list(ids) for ids in sequences]
    ids = None if algo.learner_group.is_local else [0]
    [result] = algo.learner_group.foreach_learner(
        partial(_of_learner, sequences=tokens, modules=modules), remote_actor_ids=ids
    )
    train = result.get()
    replies = call_runners(
        algo.env_runner_group, partial(_of_runner, sequences=tokens, modules=modules), timeout_s=600.0
    )
    errors = [f"env runner {i}: {r.error}" for i, r in replies.answers.items() if r.error is not None]
    if errors:
        raise RuntimeError("the layer probe failed:\n  " + "\n  ".join(errors))
    return {i: compare_captures(train, reply.value, modules) for i, reply in replies.answers.items()}


def _of_learner(learner: Any, sequences: list[list[int]], modules: Sequence[str] | None) -> Any:
    batch = PackedBatch.from_sequences(sequences).to(learner._device)
    return capture(learner.lm_module.lm, lambda model: model(batch), modules)


def _of_runner(runner: Any, sequences: list[list[int]], modules: Sequence[str] | None) -> Reply:
    def call() -> Any:
        engine = runner.engine
        if not hasattr(engine, "model"):
            kind = type(engine).__name__
            raise RuntimeError(
                f"{kind} keeps its model in another process; the layer probe needs engine='torch'"
            )
        batch = PackedBatch.from_sequences(sequences).to(engine.device)
        return capture(engine.model, lambda model: model(batch), modules)

    return runner._reply(call)
