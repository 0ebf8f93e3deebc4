"""What an iteration costs: tokens per second of its phases, and the peak memory of learners and engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm import metric_names as names
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.process.memory import peak_memory
from rllib_llm.rollout.env_runner import Reply

if TYPE_CHECKING:
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from rllib_llm.algorithm.grpo import GRPO

__all__ = ["memory", "of_iteration", "throughput"]

_PHASES = (
    names.SAMPLE_TIMER,
    names.ADVANTAGE_TIMER,
    names.LEARN_TIMER,
    names.MISMATCH_TIMER,
    names.PUSH_WEIGHTS_TIMER,
)


def of_iteration(algorithm: GRPO) -> dict[tuple[str, str], float]:
    """``("throughput", …)`` and ``("memory", …)`` of an iteration whose phases have just ended."""
    metrics = algorithm.metrics
    seconds = {name: metrics.peek((names.TIMERS, name)) for name in _PHASES}
    sampled = metrics.peek((names.ENV_RUNNERS, names.NUM_TOKENS_SAMPLED), default=0)
    trained = metrics.peek((names.LEARNERS, DEFAULT_MODULE_ID, names.NUM_TOKENS), default=0)
    timeout = algorithm.settings.rollout.push_timeout_s
    groups = {
        names.THROUGHPUT: throughput(seconds, sampled, trained),
        names.MEMORY: memory(algorithm.learner_group, algorithm.env_runner_group, timeout),
    }
    return {(group, name): value for group, values in groups.items() for name, value in values.items()}


def throughput(seconds: Mapping[str, float], sampled: float, trained: float) -> dict[str, float]:
    """Tokens per second of sampling, of learning, and of the phases together.

    seconds: phase -> its seconds in this iteration. sampled, trained: tokens of this iteration.
    """
    whole = sum(seconds.values())
    parts = {
        names.SAMPLE_TOKENS_PER_S: (sampled, seconds.get(names.SAMPLE_TIMER, 0.0)),
        names.LEARN_TOKENS_PER_S: (trained, seconds.get(names.LEARN_TIMER, 0.0)),
        names.ITERATION_TOKENS_PER_S: (sampled, whole),
    }
    return {name: tokens / time for name, (tokens, time) in parts.items() if time > 0.0}


def memory(learners: LearnerGroup, runners: EnvRunnerGroup, timeout_s: float) -> dict[str, float]:
    """GiB, the largest of all learners and of all engines: ``learner_rss_peak_gib``, ``engine_cuda_peak_gib`` …

    A learner or runner that does not answer is left out: training finds out by itself whether it is lost.
    """
    trained = [r.get() for r in learners.foreach_learner(_of_learner) if r.ok]
    sampled = [
        r.value for r in call_runners(runners, _of_runner, timeout_s=timeout_s).answers.values() if r.value
    ]
    sides = {names.LEARNER: trained, names.ENGINE: sampled}
    return {
        f"{side}_{name}": value for side, peaks in sides.items() for name, value in _largest(peaks).items()
    }


def _largest(peaks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for peak in peaks:
        out |= {name: max(value, out.get(name, 0.0)) for name, value in peak.items()}
    return out


def _of_learner(learner: Any) -> dict[str, float]:
    return peak_memory()


def _of_runner(runner: Any) -> Reply:
    reply: Reply = runner._reply(lambda: runner.engine.peak_memory())
    return reply
