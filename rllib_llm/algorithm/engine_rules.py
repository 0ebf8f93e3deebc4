"""Rules of the rollout that depend on what an engine takes, and on what a model can hold."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from precision_policies.errors import Violation, closest

if TYPE_CHECKING:
    from rllib_llm.settings.groups import ModelSettings, RolloutSettings

__all__ = ["engine_violations", "model_limit_violations"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def engine_violations(rollout: RolloutSettings) -> Iterator[Violation]:
    """What the engine of `rollout` would refuse, or cannot do, wherever it runs."""
    yield from _options(rollout)
    yield from _engine_on_cpu(rollout)


def model_limit_violations(
    model: ModelSettings, rollout: RolloutSettings, learners_on_gpu: bool = False
) -> Iterator[Violation]:
    """A context beyond the model's, ids outside its vocabulary, windows where there are none; none for a model that
    cannot be read, as others say.
    """
    from rllib_llm.models.architecture import Architecture, ArchitectureError, window_problem
    from rllib_llm.models.paths import CONFIG_FILE, read_json, resolve_model_path

    try:
        architecture = Architecture.from_config(read_json(resolve_model_path(model.path or "") / CONFIG_FILE))
    except (ArchitectureError, OSError, ValueError):
        return
    limit = architecture.max_positions
    if model.max_sequence_length is not None and model.max_sequence_length > limit:
        problem = f"must be at most {limit}, the model's max_position_embeddings"
        yield Violation("model.max_sequence_length", model.max_sequence_length, problem, "lower it")
    if outside := [token for token in rollout.stop_token_ids if token >= architecture.vocab]:
        problem = f"must be from 0 to {architecture.vocab - 1}, the model's vocabulary"
        yield Violation("rollout.stop_token_ids", outside, problem, "remove these")
    on_gpu = learners_on_gpu or str(rollout.engine_options.get("device", "")).startswith("cuda")
    if (on_gpu or rollout.engine == "vllm") and (
        window := window_problem(architecture, model.max_sequence_length)
    ):
        yield Violation("model.path", model.path, window)


def _options(rollout: RolloutSettings) -> Iterator[Violation]:
    """An engine that there is none of, and options that its constructor does not take."""
    from rllib_llm.engines.factory import ENGINES

    if rollout.engine not in ENGINES:
        problem = f"no such engine{closest(rollout.engine, ENGINES)}"
        yield Violation("rollout.engine", rollout.engine, problem, f"use one of {', '.join(ENGINES)}")
        return
    device = str(rollout.engine_options.get("device") or "cpu")
    if not _DEVICE.fullmatch(device):
        yield Violation("rollout.engine_options.device", device, "no such device", "use cpu, cuda or cuda:N")
    if not rollout.engine_options:
        return  # importing an engine takes seconds
    module, name = ENGINES[rollout.engine]
    try:
        taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    except ImportError:
        return  # said by `preflight`, where it is used
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    options = [p.name for p in taken if p.kind is p.KEYWORD_ONLY]
    elsewhere = ("num_gpus", "num_cpus")  # `placement` says what to set instead, for every engine
    for option, value in rollout.engine_options.items():
        if option not in options and option not in elsewhere:
            problem = f"engine {rollout.engine!r} has no such option{closest(option, options)}"
            key, remedy = f"rollout.engine_options.{option}", f"it takes {', '.join(options)}"
            yield Violation(key, value, problem, remedy)


def _engine_on_cpu(rollout: RolloutSettings) -> Iterator[Violation]:
    """What an engine that is told to use the CPU cannot do."""
    if str(rollout.engine_options.get("device", "")) != "cpu":
        return
    where = "with rollout.engine_options.device = 'cpu'"
    if rollout.sleep_while_learning and rollout.engine == "vllm":
        problem = f"{where}: vLLM on a CPU cannot give memory back"
        yield Violation("rollout.sleep_while_learning", True, problem, "set it to false")
    if rollout.weight_transport in ("cuda_ipc", "nccl"):
        problem = f"{where}: it copies between GPUs"
        yield Violation("rollout.weight_transport", rollout.weight_transport, problem, "use auto")
