"""Adapters as PEFT keeps them: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names the tensors ``base_model.model.X.lora_A.weight``, X being the linear's name in the model. Both matrices have
the shapes that they have here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from precision_policies import AdapterSpec, PolicyError
from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.models.adapters import factors, set_factor
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.paths import ModelPathError, read_json
from rllib_llm.models.safetensor_files import value_problems
from rllib_llm.on_disk.atomic import write_whole

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "PeftFilesError", "load_adapter", "read_spec", "save_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_BYTES = 1 << 20

_NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "megatron_config": (None,),
    "use_bdlora": (None, False),
    "velora_config": (None,),
    "arrow_config": (None,),
    "alora_invocation_tokens": (None, []),
    "lora_dropout": (0, 0.0, None),
}
"""Keys of PEFT's LoraConfig that would change the computation, with the values that do not."""


class PeftFilesError(RllibLLMError, InputError, ValueError):
    """A PEFT directory that cannot be read, or that holds what is not implemented; lists everything."""


def read_spec(directory: str | os.PathLike[str]) -> AdapterSpec:
    """Rank, alpha and targets of a PEFT directory.

    Raises:
        PeftFilesError: no such directory, a damaged config, another method than LoRA, or keys of it that are not
            implemented (DoRA, dropout, ranks that differ by layer, trained biases, ...): all of them.
    """
    file = Path(directory) / CONFIG_FILE
    config = _config(file)
    problems = [
        f"{key} = {config[key]!r}: not implemented (only {' or '.join(map(repr, allowed))})"
        for key, allowed in _NOT_IMPLEMENTED.items()
        if config.get(key, allowed[0]) not in allowed
    ]
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type = {config.get('peft_type')!r}: only 'LORA' is read")
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        problems.append(f"target_modules = {targets!r}: a pattern; list the names")
    values = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": targets,
        "use_rslora": config.get("use_rslora", False),
    }
    try:
        spec = AdapterSpec.from_dict(values)
    except (PolicyError, TypeError) as error:
        violations = getattr(error, "violations", ())
        problems += [f"{v.key}: {v.value!r} {v.problem}" for v in violations] or [str(error)]
    if problems:
        raise PeftFilesError(f"{file}:\n" + "\n".join(f"  - {p}" for p in problems))
    return spec


def _config(file: Path) -> dict[str, Any]:
    try:
        if file.is_file() and file.stat().st_size > _MAX_BYTES:
            raise PeftFilesError(f"{file}: larger than {_MAX_BYTES} bytes, this is no config")
        return read_json(file)
    except ModelPathError as error:
        raise PeftFilesError(f"{error}, or give a PEFT directory") from error


def load_adapter(model: CausalLM, directory: str | os.PathLike[str]) -> None:
    """Give a model's adapters the values of a PEFT directory, whose rank, scale and places must be the model's.

    Raises:
        PeftFilesError: lists tensors that are missing, unknown, of another shape, or not finite; nothing is loaded.
    """
    file, spec, own = Path(directory) / WEIGHTS_FILE, read_spec(directory), model.plan.adapter
    problems = []
    if own is None or (spec.rank, spec.scale) != (own.rank, own.scale):
        has = "none" if own is None else f"rank {own.rank} and scale {own.scale:g}"
        problems.append(f"rank {spec.rank} and scale {spec.scale:g}, the model's adapters have {has}")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PeftFilesError(f"{file}: not a readable safetensors file ({error}): copy it again") from error
    wanted = {f"{_PREFIX}{name}.weight": factor for name, factor in factors(model)}
    problems += [f"{name}: missing" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"{name}: not an adapter of this model" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        shape = tuple(wanted[name].plan.shape)
        if tuple(tensors[name].shape) != shape:
            problems.append(f"{name}: shape {list(tensors[name].shape)}, expected {list(shape)}")
        elif not tensors[name].is_floating_point():
            problems.append(f"{name}: dtype {tensors[name].dtype}")
        else:
            problems += value_problems(name, tensors[name], [wanted[name].compute_dtype])
    if problems:
        raise PeftFilesError(f"{file}:\n" + "\n".join(f"  - {p}" for p in problems[:40]))
    for name, factor in wanted.items():
        set_factor(factor, tensors[name])


def save_adapter(model: CausalLM, directory: str | os.PathLike[str], base: str | None = None) -> Path:
    """Write the train side's adapters, their FP32 masters, as a directory that `peft.PeftModel` reads.

    base: what the config names as its base model; default: the directory that the model was loaded from.

    Raises:
        ValueError: the model has no adapters, or is a rollout side.
    """
    if model.side != "train":
        raise ValueError("save_adapter needs the train side, which holds the master weights")
    values = {name: factor.master("weight").float() for name, factor in factors(model)}
    return write_adapter(directory, values, model.plan.adapter, base or str(model.source_path or ""))


def write_adapter(
    directory: str | os.PathLike[str],
    values: Mapping[str, torch.Tensor],
    spec: AdapterSpec | None,
    base: str,
) -> Path:
    """A PEFT directory of A and B by name (``X.lora_A``). The config comes last: without it a directory is none."""
    if spec is None:
        raise ValueError("the model has no adapters")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {f"{_PREFIX}{name}.weight": value.to("cpu").contiguous() for name, value in values.items()}
    part = target / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(target / WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "use_rslora": spec.use_rslora,
        "target_modules": spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
    }
    write_whole(target / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return target
