"""Model directories in Hugging Face format: reading (safetensors only), writing, and what lies beside the weights."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from precision_policies import AdapterSpec, Plan, PrecisionPolicy, load_policy
from precision_policies.models import FAMILIES
from rllib_llm.models.adapters import initialise_adapters
from rllib_llm.models.architecture import Architecture, ArchitectureError
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.layers import Side, master_dtype, rollout_tensors, torch_dtype
from rllib_llm.models.paths import CONFIG_FILE, ModelPathError, read_json, resolve_model_path
from rllib_llm.models.safetensor_files import (
    FLOATS,
    ModelFilesError,
    StoredTensor,
    read_tensors,
    stored_tensors,
    tensor_files,
    value_problems,
)
from rllib_llm.models.weight_writer import exchange, write_tensors
from rllib_llm.on_disk.atomic import write_whole
from rllib_llm.on_disk.owner import refuse_other_policy
from rllib_llm.process.attest import prepare_process

_SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_TOKENIZER_JSON = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip
GENERATION_FILE = "generation_config.json"
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
        values = {k: v for k, v in model.items() if k != "model_type" and not (k == "head_dim" and v is None)}
        return None, AutoConfig.for_model(model["model_type"], **values)
    return None, model


def load_config(path: Path) -> Any:
    """The transformers config of a directory; code in the directory is never executed.

    Raises:
        ArchitectureError: the architecture or a feature of it is not implemented.
        ModelPathError: config.json is damaged.
    """
    Architecture.from_config(read_json(path / CONFIG_FILE))
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # what its validation raises is of many classes
        reason = f"transformers refuses it: {type(error).__name__}: {error}"
        raise ArchitectureError(f"{path / CONFIG_FILE}: {reason}") from error


def load_tokenizer(model: str | os.PathLike[str]) -> Any:
    """The tokenizer that lies in a model directory, by transformers.

    Raises:
        ModelPathError: there is none, or one of its files is damaged.
    """
    path = resolve_model_path(model)
    there = [path / name for name in _TOKENIZER_JSON if (path / name).is_file()]
    for file in there:
        read_json(file)
    try:
        # Imported here: torch._dynamo, scikit-learn and scipy come with it, 40 % of what importing this package costs.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise plain Exceptions too
        files = ", ".join(file.name for file in there) or "there is no tokenizer.json"
        raise ModelPathError(
            f"{path}: its tokenizer cannot be read by transformers ({files}): {type(error).__name__}: {error}; copy "
            "the tokenizer's files again"
        ) from error
    # Without files, transformers 5 makes an empty tokenizer of the class that goes with model_type.
    if tokenizer.get_vocab().keys() <= {str(token) for token in tokenizer.added_tokens_decoder.values()}:
        raise ModelPathError(
            f"{path}: there is no tokenizer.json, or it has no tokens: copy the tokenizer's files of the model there"
        )
    return tokenizer


def eos_token_ids(config: Any, path: Path | None) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json if it names some, else of the config; () if neither does.

    Ids outside the vocabulary, which no completion can hold, are left out.

    Raises:
        ModelPathError: generation_config.json is damaged, or its eos_token_id is no id.
    """
    found = getattr(config, "eos_token_id", None)
    generation = None if path is None else path / GENERATION_FILE
    if generation is not None and generation.is_file():
        named = read_json(generation).get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        if named is not None and any(type(t) is not int for t in listed):
            raise ModelPathError(
                f"{generation}: eos_token_id={named!r}: a token id or a list of them is needed"
            )
        found = found if named in (None, []) else named
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return tuple(t for t in ids if 0 <= t < config.vocab_size)


def load_pretrained(
    model: str | os.PathLike[str],
    policy: Any,
    side: Side = "train",
    *,
    gradient_checkpointing: bool = False,
    allow_other_policy: bool = False,
    adapter: AdapterSpec | None = None,
) -> CausalLM:
    """Build a `CausalLM` and read its weights.

    Args:
        model: directory (config.json + safetensors, sharded or not) or shipped name.
        policy: whatever `precision_policies.load_policy` takes.
        side: "train": weights become master parameters. "rollout": they become what an export of them would be
            (rounded to the compute dtype, quantised by the same function).
        allow_other_policy: let a registered model be sampled from under a policy other than its own.
        adapter: adapters on the model of the directory, new ones of seed 0 (`initialise_adapters` makes others); the
            train side then holds of the weights what its GEMMs read.

    Raises:
        ModelPathError, ArchitectureError, ModelFilesError, PolicyError: each lists everything that is wrong.
        OtherPolicyError: side "rollout" of a registered model under another policy.
    """
    path = resolve_model_path(model)
    policy = load_policy(policy)
    if side == "rollout":
        refuse_other_policy(path, policy, allow_other_policy)
    prepare_process(policy, "torch", "cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing, "adapter": adapter}
    built = build_model(load_config(path), policy, side, **options)
    built.source_path = path
    files = tensor_files(path)
    names = _check_names(built.plan, built.architecture, path, files)
    tensors = _sound_tensors(path, files, names, _held_dtypes(policy))
    if side == "train":
        places = {name: (module, suffix) for name, module, suffix in built.base()}
        for name, tensor in tensors:
            module, suffix = places[name]
            module.set_master(suffix, tensor)
    else:
        built.load_rollout_tensors(_rollout_stream(built, tensors))
    initialise_adapters(built)
    return built


def _held_dtypes(policy: PrecisionPolicy) -> tuple[torch.dtype, ...]:
    """What weights are rounded to on their way into a GEMM."""
    return master_dtype(policy), torch_dtype(policy.compute_dtype)


def _sound_tensors(
    path: Path, files: Mapping[str, Path], names: Iterable[str], dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`read_tensors`, with a ModelFilesError at the end if values are not finite in one of `dtypes`."""
    problems: list[str] = []
    for name, tensor in read_tensors(files, names):
        problems += value_problems(name, tensor, dtypes)
        yield name, tensor
    _refuse_values(path, problems)


def _refuse_values(path: Path, problems: Sequence[str]) -> None:
    if problems:
        shown = [f"  - {p}" for p in problems[:20]] + [f"  … and {len(problems) - 20} more"] * (
            len(problems) > 20
        )
        raise ModelFilesError(
            f"{path}: {len(problems)} tensor(s) hold values that cannot be computed with; copy the weights again, or "
            "take a policy whose master_dtype and compute_dtype hold them:\n" + "\n".join(shown)
        )


@functools.lru_cache(maxsize=8)
def _all_value_problems(
    stored: tuple[tuple[str, Path, int, int], ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[str, ...]:
    """`value_problems` of (name, file, size, time of change): the weights are read once per process."""
    files = {name: file for name, file, _, _ in stored}
    return tuple(
        p for name, tensor in read_tensors(files, files) for p in value_problems(name, tensor, dtypes)
    )


def _rollout_stream(
    model: CausalLM, masters: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors -> rollout tensors; a checkpoint finer than the master dtype is rounded to that first."""
    master = master_dtype(model.policy)
    for name, tensor in masters:
        module, suffix = name.rsplit(".", 1)
        for part, value in rollout_tensors(
            model.plan[module], model.policy, suffix, tensor.to(master)
        ).items():
            yield f"{module}.{part}", value


def check_weights(model: str | os.PathLike[str], policy: Any) -> None:
    """Compare what a directory's weight files hold with its config.json, and look for values that are not finite,
    without building the model.

    Raises as `load_pretrained` does.
    """
    path, policy = resolve_model_path(model), load_policy(policy)
    config = load_config(path)
    files = tensor_files(path)
    names = _check_names(policy.resolve(config), Architecture.from_config(config), path, files)
    facts = {file: file.stat() for file in set(files.values())}
    stored = tuple(
        (name, files[name], facts[files[name]].st_size, facts[files[name]].st_mtime_ns) for name in names
    )
    _refuse_values(path, _all_value_problems(stored, _held_dtypes(policy)))


def parameter_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of a checkpoint of the planned model, without adapters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in plan.modules:
        if row.tied_to is None and row.kind != "adapter":
            shapes[f"{row.name}.weight"] = tuple(row.shape)
            if row.bias:
                shapes[f"{row.name}.bias"] = (row.shape[0],)
    return shapes


def _check_names(plan: Plan, architecture: Architecture, path: Path, files: Mapping[str, Path]) -> list[str]:
    """Names to read. ModelFilesError lists all missing, unexpected and misshapen tensors."""
    expected, found = parameter_shapes(plan), stored_tensors(files)
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
        f"{name}: shape {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name].shape != shape
    ]
    read = {*expected, "lm_head.weight"} if tied else set(expected)
    problems += _dtype_problems({name: found[name] for name in sorted(read & set(found))})
    if tied and "lm_head.weight" in found and not problems:
        problems += _tied_problem(files)
    if problems:
        raise ModelFilesError(
            f"{path}: {len(problems)} tensor(s) do not fit its config.json:\n"
            + "\n".join(f"  - {p}" for p in problems)
        )
    return list(expected)


def _dtype_problems(found: Mapping[str, StoredTensor]) -> list[str]:
    return [
        f"{name}: dtype {tensor.dtype}, codes without a scale are not weights; give the unquantised checkpoint "
        f"({', '.join(FLOATS)})"
        for name, tensor in found.items()
        if tensor.dtype not in FLOATS
    ]


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

    Tokenizer and generation config are copied from the directory that the model was loaded from. A checkpoint that lies
    in the directory is replaced in one step (`rllib_llm.models.weight_writer`), whenever the process ends.

    Args:
        dtype: "bfloat16" (the values that both sides compute with under a bf16 compute dtype), "float16", or "float32"
            (the exact masters, to continue training from).

    Returns:
        The directory.

    Raises:
        ModelFilesError: a value is not finite in `dtype`; or the directory holds another model, and its file system
            cannot replace a directory in one step. Nothing has been written.
    """
    if model.side != "train":
        raise ValueError("save_pretrained needs the train side: a rollout side holds quantised weights only")
    if model.plan.adapter is not None:
        raise ValueError(
            "save_pretrained: the base under adapters holds no master weights; write the adapters with "
            "rllib_llm.models.peft_files.save_adapter; rllib-llm models register merges them"
        )
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={dtype!r}: one of bfloat16, float16, float32")
    target, kind = Path(directory), torch_dtype(dtype)
    problems = [
        problem
        for name, module, suffix in model.masters()
        for problem in value_problems(name, module.master(suffix), [kind])
    ]
    if problems:
        raise ModelFilesError(
            f"{target}: nothing was written, {len(problems)} tensor(s) do not fit dtype={dtype!r}; save them as "
            "'float32', or 'bfloat16' if they are finite:\n" + "\n".join(f"  - {p}" for p in problems[:20])
        )
    if _holds_another_model(target, model.architecture):
        _replace_model(model, target, dtype, max_shard_bytes)
    else:
        _write_model(model, target, dtype, max_shard_bytes)
    return target


def _write_model(model: CausalLM, target: Path, dtype: str, max_shard_bytes: int) -> None:
    """Into a directory without a model, or with one of the same architecture. config.json comes last: without it a
    directory is no model."""
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: module.master(suffix).to("cpu", torch_dtype(dtype)) for name, module, suffix in model.masters()
    }
    write_tensors(target, tensors, max_shard_bytes)
    copy_side_files(model.source_path, target)
    config = dict(model.config.to_dict())
    config.pop("_name_or_path", None)  # the directory that the model was read from, of this machine and user
    config["dtype"] = dtype
    config["architectures"] = [FAMILIES[model.architecture.model_type].causal_lm]
    write_whole(target / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _holds_another_model(target: Path, architecture: Architecture) -> bool:
    """Whether the config.json of a directory is that of another architecture: its weights cannot be replaced alone."""
    if not (target / CONFIG_FILE).is_file():
        return False
    try:
        return Architecture.from_config(read_json(target / CONFIG_FILE)) != architecture
    except (ArchitectureError, ModelPathError):
        return True


def _replace_model(model: CausalLM, target: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write beside `target` and let the two directories change places; files of no model stay in `target`."""
    target = target.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        staged = Path(scratch) / target.name
        _write_model(model, staged, dtype, max_shard_bytes)
        staged.chmod(target.stat().st_mode)
        try:
            exchange(staged, target)
        except OSError as error:
            raise ModelFilesError(
                f"{target} holds another model, and a directory cannot be replaced in one step here ({error}): save "
                "into a new directory. Nothing was written."
            ) from error
        for entry in staged.iterdir():  # of the old model now
            if not (entry.name in (CONFIG_FILE, *_SIDE_FILES) or entry.name.startswith("model")):
                shutil.move(entry, target / entry.name)


def copy_side_files(source: Path | None, target: Path) -> None:
    """Copy tokenizer, chat template and generation config, those that exist, unless they are the same files."""
    if source is None or source.resolve() == target.resolve():
        return
    for name in _SIDE_FILES:
        if (source / name).is_file():
            part = target / f"{name}.part"
            shutil.copyfile(source / name, part)
            part.replace(target / name)
