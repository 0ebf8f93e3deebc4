"""Rules of the rollout that depend on what an engine takes, and on what a model can hold."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import TYPE_CHECKING

from rllib_llm.algorithm.settings import closest

if TYPE_CHECKING:
    from rllib_llm.algorithm.settings import ModelSettings, RolloutSettings

__all__ = ["engine_violations", "model_limit_violations"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def engine_violations(rollout: RolloutSettings) -> list[str]:
    """What the engine of `rollout` would refuse, or cannot do, wherever it runs."""
    return _options(rollout) + _engine_on_cpu(rollout)


def model_limit_violations(llm: ModelSettings, rollout: RolloutSettings) -> list[str]:
    """A context beyond the model's, ids outside its vocabulary; none for a model that cannot be read, as others say."""
    from rllib_llm.models.architecture import Architecture, ArchitectureError
    from rllib_llm.models.paths import CONFIG_FILE, resolve_model_path

    try:
        text = (resolve_model_path(llm.path or "") / CONFIG_FILE).read_text(encoding="utf-8")
        model = Architecture.from_config(json.loads(text))
    except (ArchitectureError, OSError, ValueError):
        return []
    v = []
    if llm.max_sequence_length is not None and llm.max_sequence_length > model.max_positions:
        v.append(
            f"llm.max_sequence_length = {llm.max_sequence_length} must be at most {model.max_positions}, the model's "
            "max_position_embeddings."
        )
    if outside := [token for token in rollout.stop_token_ids if not 0 <= token < model.vocab]:
        v.append(
            f"rollout_config.stop_token_ids = {outside} must be from 0 to {model.vocab - 1}, the model's vocabulary."
        )
    return v


def _options(rollout: RolloutSettings) -> list[str]:
    """An engine that there is none of, and options that its constructor does not take."""
    from rllib_llm.engines.factory import ENGINES

    if rollout.engine not in ENGINES:
        near = closest(rollout.engine, ENGINES)
        return [f"rollout_config.engine = {rollout.engine!r} must be one of {', '.join(ENGINES)}{near}."]
    module, name = ENGINES[rollout.engine]
    try:
        taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    except ImportError:
        return []  # said by `preflight`, where it is used
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return []
    options = [p.name for p in taken if p.kind is p.KEYWORD_ONLY]
    elsewhere = ("num_gpus", "num_cpus")  # `placement` says what to set instead, for every engine
    device = str(rollout.engine_options.get("device") or "cpu")
    start, end = "rollout_config.engine_options has no", f"for engine {rollout.engine!r}"
    problems = [
        f"{start} {option!r} {end}{closest(str(option), options)}; it takes {', '.join(options)}."
        for option in rollout.engine_options
        if option not in options and option not in elsewhere
    ]
    if not _DEVICE.fullmatch(device):
        problems.append(f"rollout_config.engine_options.device = {device!r} must be cpu, cuda or cuda:N.")
    return problems


def _engine_on_cpu(rollout: RolloutSettings) -> list[str]:
    """What an engine that is told to use the CPU cannot do."""
    v = []
    on_cpu = str(rollout.engine_options.get("device", "")) == "cpu"
    if rollout.sleep_while_learning and rollout.engine == "vllm" and on_cpu:
        v.append(
            "rollout_config.sleep_while_learning = True with rollout_config.engine_options['device'] = 'cpu': vLLM on "
            "a CPU cannot give memory back; set it to False."
        )
    if rollout.weight_transport in ("cuda_ipc", "nccl") and on_cpu:
        v.append(
            f"rollout_config.weight_transport = {rollout.weight_transport!r} with "
            "rollout_config.engine_options['device'] = 'cpu': it copies between GPUs; use 'auto'."
        )
    return v
