"""What `mlflow.pyfunc` is told about a registered model: inputs, outputs, parameters, requirements."""

from __future__ import annotations

from importlib import metadata
from typing import Any

__all__ = ["PARAMETERS", "model_signature", "requirements"]

PARAMETERS: dict[str, tuple[str, Any]] = {
    "max_tokens": ("long", 256),
    "temperature": ("double", 1.0),
    "top_p": ("double", 1.0),
    "top_k": ("long", 0),
    "seed": ("long", None),
    "engine": ("string", "torch"),
}
"""Name -> (MLflow type, default) of what ``predict(..., params=…)`` takes; meanings as in `engines.SamplingParams`."""
OUTPUTS = {"completion": "string", "finish_reason": "string", "num_tokens": "long"}
_REQUIRED = ("rllib-llm", "mlflow", "torch", "transformers", "safetensors", "omegaconf", "ray")


def model_signature() -> Any:
    """One unnamed string column in, so that a list of texts is accepted; see `pyfunc.prompts_of` for chats."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    params = [ParamSpec(name, DataType[kind], default) for name, (kind, default) in PARAMETERS.items()]
    outputs = [ColSpec(DataType[kind], name) for name, kind in OUTPUTS.items()]
    return ModelSignature(Schema([ColSpec(DataType.string)]), Schema(outputs), ParamSchema(params))


def requirements() -> list[str]:
    """Exact versions of what loading the model imports, as installed here."""
    return [f"{name}=={metadata.version(name)}" for name in _REQUIRED]
