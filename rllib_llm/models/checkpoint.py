"""Model directories in Hugging Face format: reading (safetensors only), writing, and what lies beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from precision_policies import Plan, load_policy
from rllib_llm.attest import prepare_process
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.layers import Side, rollout_tensors, torch_dtype
from rllib_llm.models.paths import CONFIG_FILE, resolve_model_path
from rllib_llm.models.safetensor_files import (
    CheckpointError,
    read_tensors,
    tensor_files,
    tensor_shapes,
    write_tensors,
)
from rllib_llm.registry.owner import refuse_other_policy

_SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "attention.bias",
    "attention.masked_bias",
)  # old exports; recomputed here
MAX_SHARD_BYTES = 4 << 30


def model_config(model: Any) -> tuple[Path | None, Any]:
    """(directory or None, transformers config) of a model path, shipped name, config object or config dict."""
    if isinstance(model, str | os.PathLike):
        path = resolve_model_path(model)
        return path, load_config(path)
    if isinstance(model, Mapping):
        Architecture.from_config(model)  # refuses what AutoConfig would not know, with our message
        values = {k: v for k, v in model.items() if k != "model_type"}
        return None, AutoConfig.for_model(model["model_type"], **values)
    return None, model


def load_config(path: Path) -> Any:
    """The transformers config of a directory; code in the directory is never executed.

    Raises:
        ArchitectureError: the architecture or a feature of it is not implemented.
    """
    Architecture.from_config(json.loads((path / CONFIG_FILE).read_text()))
    return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def load_tokenizer(model: str | os.PathLike[str]) -> Any:
    """The tokenizer that lies in a model directory, by transformers."""
    return AutoTokenizer.from_pretrained(
        resolve_model_path(model), trust_remote_code=False, local_files_only=True
    )


def eos_token_ids(config: Any, path: Path | None) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json if it names some, else of the config; () if neither does.

    Ids beyond the vocabulary, which no completion can hold, are left out.
    """
    found = getattr(config, "eos_token_id", None)
    generation = None if path is None else path / "generation_config.json"
    if generation is not None and generation.is_file():
        named = json.loads(generation.read_text()).get("eos_token_id")
        found = found if named is None else named
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return tuple(t for t in ids if t < config.vocab_size)


def load_pretrained(
    model: str | os.PathLike[str],
    policy: Any,
    side: Side = "train",
    *,
    gradient_checkpointing: bool = False,
    allow_other_policy: bool = False,
) -> CausalLM:
    """Build a `CausalLM` and read its weights.

    Args:
        model: directory (config.json + safetensors, sharded or not) or shipped name.
        policy: whatever `precision_policies.load_policy` takes.
        side: "train": weights become master parameters. "rollout": they become what an export of them would be
            (rounded to the compute dtype, quantised by the same function).
        allow_other_policy: let a registered model be sampled from under a policy other than its own.

    Raises:
        ModelPathError, ArchitectureError, CheckpointError, PolicyError: each lists everything that is wrong.
        OtherPolicyError: side "rollout" of a registered model under another policy.
    """
    path = resolve_model_path(model)
    policy = load_policy(policy)
    if side == "rollout":
        refuse_other_policy(path, policy, allow_other_policy)
    prepare_process(policy, "torch", "cuda" if torch.cuda.is_available() else "cpu")
    built = build_model(load_config(path), policy, side, gradient_checkpointing=gradient_checkpointing)
    built.source_path = path
    files = tensor_files(path)
    names = _check_names(built.plan, built.architecture, path, files)
    if side == "train":
        parameters = dict(built.named_parameters())
        with torch.no_grad():
            for name, tensor in read_tensors(files, names):
                parameters[name].copy_(tensor)
    else:
        built.load_rollout_tensors(_rollout_stream(built, read_tensors(files, names)))
    return built


def _rollout_stream(
    model: CausalLM, masters: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors -> rollout tensors; a checkpoint finer than the master dtype is rounded to that first."""
    master = torch_dtype(model.policy.master_dtype)
    for name, tensor in masters:
        module, suffix = name.rsplit(".", 1)
        for part, value in rollout_tensors(
            model.plan[module], model.policy, suffix, tensor.to(master)
        ).items():
            yield f"{module}.{part}", value


def check_weights(model: str | os.PathLike[str], policy: Any) -> None:
    """Compare what a directory's weight files say that they hold with its config.json, without loading the model.

    Raises as `load_pretrained` does.
    """
    path = resolve_model_path(model)
    config = load_config(path)
    architecture = Architecture.from_config(config)
    _check_names(load_policy(policy).resolve(config), architecture, path, tensor_files(path))


def parameter_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of a checkpoint of the planned model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in plan.modules:
        if row.tied_to is None:
            shapes[f"{row.name}.weight"] = tuple(row.shape)
            if row.bias:
                shapes[f"{row.name}.bias"] = (row.shape[0],)
    return shapes


def _check_names(plan: Plan, architecture: Architecture, path: Path, files: Mapping[str, Path]) -> list[str]:
    """Names to read. CheckpointError lists all missing, unexpected and misshapen tensors."""
    expected, found = parameter_shapes(plan), tensor_shapes(files)
    tied = architecture.tied
    extra = [
        name
        for name in sorted(set(found) - set(expected))
        if not name.endswith(_IGNORED_SUFFIXES) and not (tied and name == "lm_head.weight")
    ]
    problems = [
        f"{name}: missing (shape {list(expected[name])})" for name in sorted(set(expected) - set(found))
    ]
    problems += [f"{name}: not part of a {architecture.model_type} model of this config" for name in extra]
    problems += [
        f"{name}: shape {list(found[name])}, the config says {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name] != shape
    ]
    if tied and "lm_head.weight" in found and not problems:
        problems += _tied_problem(files)
    if problems:
        raise CheckpointError(
            f"{path}: {len(problems)} tensor(s) do not fit its config.json:\n"
            + "\n".join(f"  - {p}" for p in problems)
        )
    return list(expected)


def _tied_problem(files: Mapping[str, Path]) -> list[str]:
    pair = dict(read_tensors(files, ["lm_head.weight", "model.embed_tokens.weight"]))
    if torch.equal(pair["lm_head.weight"], pair["model.embed_tokens.weight"]):
        return []
    return [
        "lm_head.weight: differs from model.embed_tokens.weight although config.json says tie_word_embeddings: true; "
        "set that to false if the model was trained untied"
    ]


def save_pretrained(
    model: CausalLM,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the train side's master weights as a Hugging Face directory that `AutoModelForCausalLM` reads.

    Tokenizer and generation config are copied from the directory that the model was loaded from.

    Args:
        dtype: "bfloat16" (the values that both sides compute with under a bf16 compute dtype) or "float32" (the
            exact masters, to continue training from).

    Returns:
        The directory.
    """
    if model.side != "train":
        raise ValueError("save_pretrained needs the train side: a rollout side holds quantised weights only")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={dtype!r}: one of bfloat16, float16, float32")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to("cpu", torch_dtype(dtype)) for name, parameter in model.named_parameters()
    }
    write_tensors(target, tensors, max_shard_bytes)
    config = dict(model.config.to_dict())
    config["dtype"] = dtype
    config["architectures"] = [_ARCHITECTURES[model.architecture.model_type]]
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_side_files(model.source_path, target)
    return target


def copy_side_files(source: Path | None, target: Path) -> None:
    """Copy tokenizer, chat template and generation config, those that exist, unless they are the same files."""
    if source is None or source.resolve() == target.resolve():
        return
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
