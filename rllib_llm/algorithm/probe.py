"""On request: which module, which operator makes the difference between learner and env runners, on given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.mismatch import LayerMismatch, capture, compare_captures
from rllib_llm.mismatch.localise import Localisation, compare_traces, with_training
from rllib_llm.mismatch.workload import Workload, trace_learner, trace_rollout
from rllib_llm.models import PackedBatch
from rllib_llm.rollout.env_runner import Reply

if TYPE_CHECKING:
    from rllib_llm.algorithm.grpo import GRPO

__all__ = ["probe_layers", "probe_operators"]


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
    train, sides = _both_sides(
        algo,
        partial(_of_learner, sequences=tokens, modules=modules),
        partial(_of_runner, sequences=tokens, modules=modules),
    )
    return {i: compare_captures(train, side, modules) for i, side in sides.items()}


def probe_operators(algo: GRPO, sequences: Sequence[Sequence[int]]) -> dict[int, Localisation]:
    """As `probe_layers`, but operator by operator, with ulps and evidence (`rllib_llm.mismatch.localise`).

    The runners prefill the sequences in their engines' chunks, with a KV cache, at temperature 1.
    """
    workload = Workload.prompts_only(sequences)
    train, sides = _both_sides(
        algo,
        partial(_trace_of_learner, workload=workload),
        partial(_trace_of_runner, workload=workload),
    )
    scores, step = train
    return {
        i: with_training(compare_traces(scores, side, workload), step, scores, workload)
        for i, side in sides.items()
    }


def _both_sides(
    algo: GRPO, of_learner: Callable[[Any], Any], of_runner: Callable[[Any], Reply]
) -> tuple[Any, dict[int, Any]]:
    """What the first learner and every env runner answer. RuntimeError naming the runners that could not."""
    ids = None if algo.learner_group.is_local else [0]
    [result] = algo.learner_group.foreach_learner(of_learner, remote_actor_ids=ids)
    train = result.get()
    replies = call_runners(algo.env_runner_group, of_runner, timeout_s=600.0)
    errors = [f"env runner {i}: {r.error}" for i, r in replies.answers.items() if r.error is not None]
    if errors:
        raise RuntimeError("the layer probe failed:\n  " + "\n  ".join(errors))
    return train, {i: reply.value for i, reply in replies.answers.items()}


def _of_learner(learner: Any, sequences: list[list[int]], modules: Sequence[str] | None) -> Any:
    batch = PackedBatch.from_sequences(sequences).to(learner._device)
    return capture(learner.lm_module.lm, lambda model: model(batch), modules)


def _of_runner(runner: Any, sequences: list[list[int]], modules: Sequence[str] | None) -> Reply:
    def call() -> Any:
        engine = _engine_in_reach(runner)
        batch = PackedBatch.from_sequences(sequences).to(engine.device)
        return capture(engine.model, lambda model: model(batch), modules)

    return runner._reply(call)


def _trace_of_learner(learner: Any, workload: Workload) -> Any:
    return tuple(trace_learner(learner.lm_module.lm, workload, training) for training in (False, True))


def _trace_of_runner(runner: Any, workload: Workload) -> Reply:
    def call() -> Any:
        engine = _engine_in_reach(runner)
        return trace_rollout(engine.model, workload, max_prefill_tokens=engine.max_prefill_tokens)

    return runner._reply(call)


def _engine_in_reach(runner: Any) -> Any:
    engine = runner.engine
    if not hasattr(engine, "model"):
        kind = type(engine).__name__
        raise RuntimeError(f"{kind} keeps its model in another process; the layer probe needs engine='torch'")
    return engine
