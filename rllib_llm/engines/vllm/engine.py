"""`VLLMEngine`: the handle of a vLLM that runs in a Ray actor of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from precision_policies import AdapterSpec, Attestation, PrecisionPolicy, load_policy
from rllib_llm.engines.base import (
    CHECKPOINT_VERSION,
    NO_WEIGHTS,
    Completion,
    RolloutEngine,
    SamplingParams,
    StepSize,
)
from rllib_llm.engines.checks import (
    check_prompts,
    check_same_params,
    check_sampling_policy,
    context_length,
    pending_of,
)
from rllib_llm.engines.state import EngineState, require_idle, require_sleep_level
from rllib_llm.engines.vllm import compat
from rllib_llm.engines.vllm.actor import VLLMActor, config_directory, has_tokenizer
from rllib_llm.engines.vllm.requests import Pending, check_params, request_seeds
from rllib_llm.engines.vllm.worker import WorkerOptions
from rllib_llm.errors import EngineError
from rllib_llm.models.architecture import Architecture, refuse_windows
from rllib_llm.models.checkpoint import eos_token_ids, model_config
from rllib_llm.on_disk.owner import refuse_other_policy
from rllib_llm.sync.packed import WeightUpdate
from rllib_llm.sync.receiver import Incoming
from rllib_llm.sync.stream import StreamOffer, give_up
from rllib_llm.sync.topology import Place
from rllib_llm.sync.verify import WeightReceipt

PING_TIMEOUT_S = 60.0
"""A vLLM that does nothing else and does not answer within this time is dead to `VLLMEngine.alive`."""
_MAX_NUM_SEQS = 256
_MOST_BATCHED_TOKENS = 16384
"""vLLM's largest default of `max_num_batched_tokens` for `vllm.LLM` (`EngineArgs.get_batch_defaults` of 0.32)."""
CHUNK_BYTES = 256 << 20
"""Weights that travel through Ray's object store do so in chunks of about this size."""


class VLLMEngine(RolloutEngine):
    """vLLM scheduling, paging and sampling around the learner's operators.

    Args:
        model: a model directory, shipped name, or transformers config (weights come with the first `update_weights`).
        policy: what `precision_policies.load_policy` takes.
        load_weights: False ignores the weights of a model directory and waits for the first update.
        max_model_len: context in tokens; default and upper bound: the model's max_position_embeddings.
        max_num_seqs: most sequences decoded at once.
        max_num_batched_tokens: most tokens of one step (longer prompts are chunked on a GPU; on CPU it must
            hold a whole context, see `compat.llm_options`); vLLM's default if None.
        kv_cache_bytes: size of the KV cache; None: vLLM takes `gpu_memory_utilization` of the GPU (1 GiB on CPU).
        gpu_memory_utilization: share of GPU memory for weights and KV cache.
        enable_prefix_caching: keep prompts' keys and values, shared by the completions of a group.
        cuda_graphs: run steps as CUDA graphs (GPU): those that decode, and those with prompts of up to `graph_tokens`.
        graph_tokens: tokens of the largest step with prompts in it that is a graph, up to 2048; 0: none. More take the
            start longer (`compat.graph_options`).
        sleep_mode: allow `sleep` (GPU; vLLM then allocates through its own pool).
        device: "cuda" or "cpu"; default: what this machine has.
        num_gpus, num_cpus: what the actor asks of Ray. 0 GPUs with device "cuda" means: those of this process.
        start_timeout_s, call_timeout_s: an actor that does not answer in time is killed, the call raises EngineError.
        seed: seed of vLLM's own generator; requests carry their own.
        vllm_options: further arguments of `vllm.LLM`.
        allow_other_policy: load a registered model under a policy other than its own, which is refused otherwise.
        adapter: low-rank adapters on the model, one set for all requests; vLLM's own LoRA is not used.

    Raises:
        UnsupportedVLLMError, ArchitectureError, EngineError (the actor did not start: with its reason).
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        *,
        load_weights: bool = True,
        max_model_len: int | None = None,
        max_num_seqs: int = _MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.6,
        enable_prefix_caching: bool = True,
        cuda_graphs: bool = True,
        graph_tokens: int = 1024,
        sleep_mode: bool = False,
        device: str | None = None,
        num_gpus: float = 0,
        num_cpus: float = 0,
        start_timeout_s: float = 900,
        call_timeout_s: float = 3600,
        seed: int = 0,
        vllm_options: dict[str, Any] | None = None,
        allow_other_policy: bool = False,
        adapter: AdapterSpec | None = None,
    ) -> None:
        compat.vllm_version()
        self.policy: PrecisionPolicy = load_policy(policy)
        self._path, config = model_config(model)
        if self._path is not None and load_weights:
            refuse_other_policy(self._path, self.policy, allow_other_policy)
        architecture = Architecture.from_config(config)
        self.max_model_len = context_length(max_model_len, architecture.max_positions)
        refuse_windows(architecture, self.max_model_len)
        self.vocab = architecture.vocab
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = eos_token_ids(config, self._path)
        self._options = WorkerOptions(
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            cuda_graphs=cuda_graphs,
            graph_tokens=graph_tokens,
            sleep_mode=sleep_mode,
            has_tokenizer=has_tokenizer(self._path),
            seed=seed,
            adapter=None if adapter is None else adapter.to_dict(),
            extra=dict(vllm_options or {}),
        )
        self._call_timeout_s = call_timeout_s
        self._state = EngineState()
        self._requests = Pending()
        self._pending_params = SamplingParams()
        self._directory = config_directory(self._path, config)
        resources = {"num_gpus": num_gpus, "num_cpus": num_cpus, "call_timeout_s": call_timeout_s}
        self._actor = VLLMActor(self._directory.name, self.policy, self._options, **resources)
        self._start(start_timeout_s, load_weights)

    @classmethod
    def largest_step(cls, options: Mapping[str, Any]) -> StepSize:
        return StepSize(
            options.get("max_num_seqs", _MAX_NUM_SEQS),
            options.get("max_num_batched_tokens") or _MOST_BATCHED_TOKENS,
        )

    def _start(self, timeout_s: float, load_weights: bool) -> None:
        self._place: Place = self._call("ready", timeout_s=timeout_s)["place"]
        if load_weights and self._path is not None:
            # its policy was compared in __init__, where the permission to change it is known
            self._call("load_checkpoint", str(self._path), True, timeout_s=timeout_s)
            self._state.version = CHECKPOINT_VERSION

    @property
    def weights_version(self) -> int:
        return self._state.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        self._check_request(prompts, params)
        self._state.require_sampling()
        require_idle(self._requests.rows)
        if not prompts:
            return []
        plain = [[int(t) for t in p] for p in prompts]
        answers = self._call("generate", plain, params, request_seeds(len(prompts), params, seeds))
        return [
            [Completion(ids, logp, reason, self._state.version) for ids, logp, reason in row]
            for row in answers
        ]

    def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[int]:
        self._check_request(prompts, params)
        if self._requests:
            check_same_params(self._pending_params, params)
        rows = request_seeds(len(prompts), params, seeds)
        self._pending_params = params
        ids, batch = self._requests.add(prompts, params.n, rows)
        try:
            self._call("submit", batch.names, batch.prompts, params, batch.seeds)
        except Exception:
            if self._actor.alive:
                self.abort()
            raise
        return ids

    def collect(self, timeout_s: float) -> dict[int, list[Completion]]:
        self._state.require_awake()
        deadline = time.monotonic() + timeout_s
        done: dict[int, list[Completion]] = {}
        while self._requests and not done:
            left = max(0.0, deadline - time.monotonic())
            try:
                finished = self._call("collect", left, timeout_s=left + self._call_timeout_s)
            except EngineError:
                self._requests.clear()
                raise
            except BaseException:
                self.abort()  # interrupted: what had finished may be on its way, and would never come again
                raise
            done = self._requests.take(finished, self._state.version)
            if self._state.paused or time.monotonic() >= deadline:
                break
        return done

    def abort(self, requests: Sequence[int] | None = None) -> list[int]:
        self._state.require_open()
        ended = pending_of(self._requests.rows, requests)
        self._call("abort", [name for request in ended for name in self._requests.names(request)])
        self._requests.forget(ended)
        return ended

    def pause(self) -> None:
        self._state.require_open()
        self._call("pause")
        self._state.paused = True

    def resume(self) -> None:
        self._state.require_open()
        self._call("resume")
        self._state.paused = False

    @property
    def pending(self) -> int:
        return len(self._requests)

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        try:
            return self._actor.call(method, *arguments, timeout_s=timeout_s)
        finally:
            if not self._actor.alive:
                self.close()

    def _check_request(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self._state.require_weights()
        check_sampling_policy(self.policy, params)
        check_prompts(prompts, self.vocab, self.max_model_len)
        drafts = self._options.extra.get("speculative_config") is not None
        check_params(params, self._eos, self.vocab, self._options.has_tokenizer, drafts)

    @property
    def place(self) -> Place:
        return self._place

    def update_weights(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        self._state.require_awake()
        require_idle(self._requests.rows)
        try:
            receipt = self._send(update)
        except EngineError as error:  # it broke off after a part was applied, or vLLM is gone
            self._state.version = NO_WEIGHTS
            if isinstance(update, StreamOffer):
                with contextlib.suppress(RuntimeError):  # the learner may be gone too
                    give_up(update, str(error))
            raise
        self._state.version = receipt.version
        return receipt

    def _send(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        if isinstance(update, StreamOffer):
            receipt: WeightReceipt = self._call("take", update)
            return receipt
        if not isinstance(update, WeightUpdate):
            raise TypeError(
                f"{type(update).__name__} cannot leave this process, and vLLM runs in another one; "
                "send a WeightUpdate or the offer of a WeightSender"
            )
        for chunk in update.split(CHUNK_BYTES):
            self._call("stage", chunk)
        applied: WeightReceipt = self._call("apply")
        return applied

    def holds_base(self, base: str) -> bool:
        self._state.require_awake()
        if self._state.version == NO_WEIGHTS:
            return False
        held: bool = self._call("holds_base", base)
        return held

    def attest(self) -> Attestation:
        self._state.require_awake()
        attestation: Attestation = self._call("attest")
        return attestation

    def peak_memory(self) -> dict[str, float]:
        self._state.require_open()
        peaks: dict[str, float] = self._call("peak_memory")
        return peaks

    def sleep(self, level: int = 1) -> None:
        require_sleep_level(level)
        self._state.require_open()
        if self.device == "cpu" or not self._options.sleep_mode:
            raise EngineError(
                "sleep needs a GPU and the option sleep_mode=True; vLLM on CPU cannot give memory back"
            )
        require_idle(self._requests.rows)
        self._call("sleep", level)
        self._state.asleep = True
        if level == 2:
            self._state.version = NO_WEIGHTS

    def wake(self) -> None:
        self._state.require_open()
        if self._state.asleep:
            self._call("wake")
            self._state.asleep = False

    def alive(self) -> bool:
        if self._actor.alive:
            with contextlib.suppress(EngineError):
                self._call("ready", timeout_s=min(self._call_timeout_s, PING_TIMEOUT_S))
        return self._actor.alive

    def close(self) -> None:
        self._actor.kill()
        self._state.close()
        self._requests.clear()
        self._directory.cleanup()
