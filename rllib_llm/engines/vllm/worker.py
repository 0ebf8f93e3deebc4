"""The process that owns a `vllm.LLM`: runs in its own Ray actor, made by `rllib_llm.engines.vllm.engine`.

vLLM reseeds the global random generators of its process and replaces some torch functions, therefore it never
shares a process with a learner or an env runner. The engine core runs in this very process, so that the
weights that vLLM computes with can be written in place and hashed where they lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from precision_kernels.hopper.attention_width import attention_width
from precision_policies import Attestation, PrecisionPolicy
from rllib_llm.engines.base import CHECKPOINT_VERSION, NO_WEIGHTS, SamplingParams
from rllib_llm.engines.state import require_idle
from rllib_llm.engines.stopping import stop_ids
from rllib_llm.engines.vllm import compat
from rllib_llm.engines.vllm.background import Background
from rllib_llm.engines.vllm.requests import Sampled
from rllib_llm.errors import EngineError
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.checkpoint import eos_token_ids, load_pretrained, model_config
from rllib_llm.models.sampling_distribution import SamplingDistribution
from rllib_llm.process.attest import build_attestation
from rllib_llm.process.memory import peak_memory
from rllib_llm.sync.base import holds_base
from rllib_llm.sync.packed import WeightChunk, WeightUpdate
from rllib_llm.sync.stream import Groups, StreamOffer
from rllib_llm.sync.take import take_update
from rllib_llm.sync.topology import place_of
from rllib_llm.sync.verify import WeightReceipt


@dataclass(frozen=True)
class WorkerOptions:
    """Sizes and switches of the `vllm.LLM`; see `rllib_llm.engines.vllm.engine.VLLMEngine`."""

    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    cuda_graphs: bool
    sleep_mode: bool
    has_tokenizer: bool
    seed: int
    graph_tokens: int = 1024
    adapter: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class VLLMWorker:
    """One `vllm.LLM` on `directory` (config.json, perhaps a tokenizer; weights come by `update`)."""

    def __init__(self, directory: str, policy: dict[str, Any], options: WorkerOptions) -> None:
        compat.vllm_version()
        compat.register_model()
        from vllm import LLM

        self.policy = PrecisionPolicy.from_dict(policy)
        self.options = options
        config = model_config(directory)[1]
        head_dim = Architecture.from_config(config).head_dim
        self._eos = eos_token_ids(config, Path(directory))
        self.llm = LLM(**_llm_arguments(directory, head_dim, self.policy, options))
        self.model = compat.loaded_model(self.llm)
        compat.watch_rows(self.llm, self.model)
        if options.device == "cuda":
            compat.sum_keys_in_order(self.llm)
        self.version = NO_WEIGHTS
        self._chunks: list[WeightChunk] = []
        self._background = Background(self.llm.llm_engine, _sampled)
        self._groups = Groups()
        self._place = place_of(next(self.model.lm.buffers()).device)

    def ready(self) -> dict[str, Any]:
        """Facts that the handle needs: vocabulary size, and where the weights are."""
        return {"vocab": self.model.lm.architecture.vocab, "place": self._place}

    # ------------------------------------------------------------------ generation

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sampled]]:
        """``seeds[p][i]`` seeds completion i of prompt p; each is a request of its own, prefixes are
        shared by the cache.
        """
        require_idle(self._background.pending)
        self._use_distribution(params)
        requests = [(list(p), s) for p, row in zip(prompts, seeds, strict=True) for s in row]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [self._vllm_params(params, seed, len(prompt)) for prompt, seed in requests],
            use_tqdm=False,
        )
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
        answers = iter(_sampled(output.outputs[0]) for output in outputs)
        return [[next(answers) for _ in row] for row in seeds]

    def submit(
        self,
        names: Sequence[str],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> None:
        """Begin requests of one completion each and return; all that are pending have one sampling distribution."""
        self._use_distribution(params)
        self._background.submit(
            [
                (name, {"prompt_token_ids": list(prompt)}, self._vllm_params(params, seed, len(prompt)))
                for name, prompt, seed in zip(names, prompts, seeds, strict=True)
            ]
        )

    def collect(self, timeout_s: float) -> dict[str, Sampled]:
        """What has finished; see `Background.collect`."""
        return self._background.collect(timeout_s)

    def abort(self, names: Sequence[str]) -> None:
        """End requests without completions."""
        self._background.abort(names)

    def pause(self) -> None:
        """See `Background.pause`."""
        self._background.pause()

    def resume(self) -> None:
        """See `Background.resume`."""
        self._background.resume()

    def _use_distribution(self, params: SamplingParams) -> None:
        truncation = (params.top_k, params.top_p) if params.temperature > 0 else (0, 1.0)
        banned = stop_ids(params, self._eos) if params.min_tokens else ()
        self.model.distribution = SamplingDistribution(
            params.temperature or 1.0, *truncation, banned, params.min_tokens
        )

    def _vllm_params(self, params: SamplingParams, seed: int, prompt_length: int) -> Any:
        """vLLM draws from the log-probs that the model returns, so temperature and truncation are off there; its own
        ban of stop ids before `min_tokens` finds them at -inf.
        """
        from vllm.sampling_params import RequestOutputKind

        return compat.sampling_params(
            temperature=0.0 if params.temperature == 0 else 1.0,
            max_tokens=params.max_tokens,
            # vLLM would wait for ever for a min_tokens that does not fit into the context
            min_tokens=min(params.min_tokens, self.options.max_model_len - prompt_length),
            stop_token_ids=list(stop_ids(params, self._eos)),
            stop=list(params.stop) or None,
            seed=seed,
            logprobs=0,
            detokenize=bool(params.stop),
            skip_special_tokens=False,  # a stop string may be, or contain, a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    # ------------------------------------------------------------------ weights

    def stage(self, chunk: WeightChunk) -> None:
        """Keep one chunk of an update in host memory; chunk 0 begins a new update."""
        if chunk.index == 0:
            self._chunks = []
        self._chunks.append(chunk)

    def apply(self) -> WeightReceipt:
        """`take` the staged update."""
        chunks, self._chunks = self._chunks, []
        return self.take(WeightUpdate.assemble(chunks))

    def take(self, update: WeightUpdate | StreamOffer) -> WeightReceipt:
        """Verify an update as a whole, then copy it over the weights in place and drop cached prefixes.

        Raises:
            WeightSyncError: nothing has been applied.
            EngineError: it broke off later, or vLLM would not drop its prefix cache; there are `NO_WEIGHTS`.
        """
        require_idle(self._background.pending)
        return take_update(update, self.model.lm, self._groups, self._begin_load, self._finish_load)

    def load(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors that need no verification (any device) over the weights, one at a time."""
        self._begin_load()
        self.model.lm.load_rollout_tensors(tensors)
        self._finish_load(version)

    def _begin_load(self) -> None:
        self.version = NO_WEIGHTS

    def _finish_load(self, version: int) -> None:
        if self.options.enable_prefix_caching and self.llm.reset_prefix_cache() is False:
            raise EngineError(
                "vLLM refused to reset its prefix cache (requests are running): stale keys would be reused"
            )
        self.version = version

    def holds_base(self, base: str) -> bool:
        """See `RolloutEngine.holds_base`."""
        return holds_base(self.model.lm, base)

    def load_checkpoint(self, path: str, allow_other_policy: bool = False) -> None:
        """The weights of a model directory, rounded and quantised as an export of them would be."""
        adapter = self.model.lm.plan.adapter
        loaded = load_pretrained(
            path, self.policy, "rollout", allow_other_policy=allow_other_policy, adapter=adapter
        )
        self.load(CHECKPOINT_VERSION, loaded.named_buffers())

    def peak_memory(self) -> dict[str, float]:
        """`rllib_llm.process.memory.peak_memory` of this process; what vLLM's sleep allocator holds is not torch's."""
        return peak_memory()

    def attest(self) -> Attestation:
        """The statement of this process; on CUDA the attention operator is the one that vLLM's layers are
        bound to.
        """
        from precision_kernels import bound_implementations

        lm = self.model.lm
        device = torch.device(self.options.device)
        operators = bound_implementations(device.type)
        identities = {compat.attention_identity(layer.self_attn.attend.layer) for layer in lm.model.layers}
        graphs = compat.GraphState("NONE", ())
        if device.type == "cuda":
            graphs = compat.graph_state(self.llm)
            operators["attention"] = compat.attention_operator(identities, operators["attention"], graphs)
        shown = {
            "engine": f"vllm {compat.vllm_version()}",
            "weights_version": str(self.version),
            "attention_layers": ", ".join(sorted(identities)),
            "cuda_graphs": graphs.mode,
            "attention_splits": str(list(graphs.splits)),
            "options": json.dumps(asdict(self.options), sort_keys=True, default=str),
        }
        held = lm.weight_hashes() if self.version != NO_WEIGHTS else {}
        return build_attestation(
            "rollout",
            self.policy,
            lm.plan,
            device,
            engine="vllm",
            weights=held,
            operators=operators,
            informational=shown,
        )

    # ------------------------------------------------------------------ memory

    def sleep(self, level: int) -> None:
        """Give GPU memory back (vLLM's sleep levels); after level 2 the weights are gone until the next update."""
        require_idle(self._background.pending)
        if self.options.enable_prefix_caching and self.llm.reset_prefix_cache() is False:
            raise EngineError(
                "vLLM refused to reset its prefix cache, whose pages are about to be given back"
            )
        if level == 2:
            self.version = NO_WEIGHTS
        self.llm.sleep(level=level)

    def wake(self) -> None:
        self.llm.wake_up()


def _llm_arguments(
    directory: str, head_dim: int, policy: PrecisionPolicy, options: WorkerOptions
) -> dict[str, Any]:
    from rllib_llm.engines.vllm.model import ADAPTER_KEY, CONFIG_KEY, HEAD_DIM_KEY

    width = attention_width(head_dim) if options.device == "cuda" else head_dim
    overrides = {
        "architectures": [compat.ARCHITECTURE],
        CONFIG_KEY: policy.to_dict(),
        HEAD_DIM_KEY: head_dim,
        ADAPTER_KEY: options.adapter,
        "head_dim": width,  # vLLM plans pages and attention's schedule by it
    }
    arguments: dict[str, Any] = {
        "model": directory,
        "skip_tokenizer_init": not options.has_tokenizer,
        "load_format": "dummy",
        "dtype": policy.compute_dtype,
        "hf_overrides": overrides,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enable_prefix_caching": options.enable_prefix_caching,
        "seed": options.seed,
        "disable_log_stats": True,
    }
    arguments |= _sizes(options)
    graphs = compat.graph_options(options.max_num_seqs, options.graph_tokens, width)
    numerics = compat.llm_options(
        options.device, graphs=graphs if options.cuda_graphs else None, sleep_mode=options.sleep_mode
    )
    taken = sorted(set(options.extra) & {*arguments, *numerics, *compat.NOT_OPTIONS})
    if taken:
        raise ValueError(
            f"vllm_options {', '.join(taken)}: set by the policy and the engine's own options; another value would "
            "change numerics that the attestation vouches for. Leave them out"
        )
    return arguments | numerics | options.extra


def _sizes(options: WorkerOptions) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if options.max_num_batched_tokens is not None:
        sizes["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.kv_cache_bytes is not None:
        sizes["kv_cache_memory_bytes"] = options.kv_cache_bytes
    elif options.device == "cpu":
        # 0.32 would take 92 % of the machine's memory, and refuse where less is free
        sizes["kv_cache_memory_bytes"] = 1 << 30
    if options.device == "cuda":
        sizes["gpu_memory_utilization"] = options.gpu_memory_utilization
    return sizes


def _sampled(output: Any) -> Sampled:
    """One vLLM completion as arrays.

    Raises:
        EngineError: aborted, log-probs missing, or not finite.
    """
    ids = np.asarray(output.token_ids, dtype=np.int64)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended a completion with finish_reason={output.finish_reason!r} after {len(ids)} tokens"
        )
    if output.logprobs is None or len(output.logprobs) != len(ids):
        raise EngineError(f"vLLM returned no log-prob for some of {len(ids)} tokens")
    logprobs = np.asarray(
        [row[int(t)].logprob for row, t in zip(output.logprobs, ids, strict=True)], dtype=np.float32
    )
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("vLLM returned log-probs that are not finite: the weights or the formats overflow")
    return ids, logprobs, output.finish_reason
