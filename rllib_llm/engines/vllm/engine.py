"""`VLLMEngine`: the handle of a vLLM that runs in a Ray actor of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from precision_policies import Attestation, PrecisionPolicy, load_policy
from rllib_llm.engines.base import (
    CHECKPOINT_VERSION,
    NO_WEIGHTS,
    Completion,
    EngineError,
    PromptError,
    RolloutEngine,
    SamplingParams,
    SamplingParamsError,
    check_prompts,
    check_sampling_policy,
)
from rllib_llm.engines.torch_engine import sequence_seeds
from rllib_llm.engines.vllm import compat
from rllib_llm.engines.vllm.worker import VLLMWorker, WorkerOptions
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.checkpoint import model_config
from rllib_llm.registry.owner import refuse_other_policy
from rllib_llm.sync.packed import WeightSyncError, WeightUpdate
from rllib_llm.sync.receiver import Incoming
from rllib_llm.sync.stream import StreamOffer, give_up
from rllib_llm.sync.topology import Place
from rllib_llm.sync.verify import WeightReceipt

logger = logging.getLogger(__name__)
CHUNK_BYTES = 256 << 20
"""Weights that travel through Ray's object store do so in chunks of about this size."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are written and hashed in the process that computes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # its own layers are not used; minutes of JIT otherwise
    "HF_HUB_OFFLINE": "1",
}


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
        cuda_graphs: decode in full CUDA graphs (GPU).
        sleep_mode: allow `sleep` (GPU; vLLM then allocates through its own pool).
        device: "cuda" or "cpu"; default: what this machine has.
        num_gpus, num_cpus: what the actor asks of Ray. 0 GPUs with device "cuda" means: those of this process.
        start_timeout_s, call_timeout_s: an actor that does not answer in time is killed, the call raises EngineError.
        seed: seed of vLLM's own generator; requests carry their own.
        vllm_options: further arguments of `vllm.LLM`.
        allow_other_policy: load a registered model under a policy other than its own, which is refused otherwise.

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
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.6,
        enable_prefix_caching: bool = True,
        cuda_graphs: bool = True,
        sleep_mode: bool = False,
        device: str | None = None,
        num_gpus: float = 0,
        num_cpus: float = 0,
        start_timeout_s: float = 900,
        call_timeout_s: float = 3600,
        seed: int = 0,
        vllm_options: dict[str, Any] | None = None,
        allow_other_policy: bool = False,
    ) -> None:
        compat.vllm_version()
        self.policy: PrecisionPolicy = load_policy(policy)
        self._path, config = model_config(model)
        if self._path is not None and load_weights:
            refuse_other_policy(self._path, self.policy, allow_other_policy)
        architecture = Architecture.from_config(config)
        if max_model_len is not None and not 2 <= max_model_len <= architecture.max_positions:
            raise ValueError(
                f"max_model_len={max_model_len}: the model supports 2 to {architecture.max_positions}"
            )
        self.max_model_len = max_model_len or architecture.max_positions
        self.vocab = architecture.vocab
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._has_tokenizer = self._path is not None and any(
            (self._path / f).is_file() for f in _TOKENIZER_FILES
        )
        self._options = WorkerOptions(
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            cuda_graphs=cuda_graphs,
            sleep_mode=sleep_mode,
            has_tokenizer=self._has_tokenizer,
            seed=seed,
            extra=dict(vllm_options or {}),
        )
        self._call_timeout_s = call_timeout_s
        self._version = NO_WEIGHTS
        self._asleep = False
        self._directory = _config_directory(self._path, config)
        self._actor: Any = self._start(num_gpus, num_cpus, start_timeout_s, load_weights)

    def _start(self, num_gpus: float, num_cpus: float, timeout_s: float, load_weights: bool) -> Any:
        environment = _PROCESS_ENVIRONMENT | self.policy.environment(engine="vllm", device=self.device)
        if self.device == "cuda" and not num_gpus:
            # Ray hides the GPUs from an actor that reserves none; this one shares those of the env runner.
            environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
            if "CUDA_VISIBLE_DEVICES" in os.environ:
                environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        remote = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(VLLMWorker)
        actor = remote.options(runtime_env={"env_vars": environment}).remote(
            self._directory.name, self.policy.to_dict(), self._options
        )
        logger.info("starting vLLM %s on %s", compat.vllm_version(), self.device)
        self._actor = actor
        self._place: Place = self._get(actor.ready.remote(), timeout_s, "start")["place"]
        if load_weights and self._path is not None:
            # its policy was compared in __init__, where the permission to change it is known
            self._get(actor.load_checkpoint.remote(str(self._path), True), timeout_s, "load_checkpoint")
            self._version = CHECKPOINT_VERSION
        return actor

    @property
    def weights_version(self) -> int:
        return self._version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        self._require_awake()
        if self._version == NO_WEIGHTS:
            raise EngineError(
                "the engine has no weights yet: call update_weights() with an export of the learner first"
            )
        check_sampling_policy(self.policy, params)
        check_prompts(prompts, self.vocab, self.max_model_len)
        self._check_params(params)
        if not prompts:
            return []
        request_seeds = [
            [_request_seed(seed, child) for child in range(params.n)]
            for seed in sequence_seeds(len(prompts), params.seed, seeds)
        ]
        plain = [[int(t) for t in p] for p in prompts]
        answers = self._get(
            self._actor.generate.remote(plain, params, request_seeds), self._call_timeout_s, "generate"
        )
        return [
            [Completion(ids, logp, reason, self._version) for ids, logp, reason in row] for row in answers
        ]

    def _check_params(self, params: SamplingParams) -> None:
        problems = []
        if params.min_tokens:
            problems.append(
                f"min_tokens={params.min_tokens}: vLLM masks stop ids after normalising log-probs, they would not be "
                "those of the distribution sampled from; use 0, or engine='torch'"
            )
        if params.stop and not self._has_tokenizer:
            problems.append(
                f"stop={params.stop}: needs a model directory with a tokenizer; use stop_token_ids"
            )
        if problems:
            raise SamplingParamsError(
                "sampling parameters refused:\n" + "\n".join(f"  - {p}" for p in problems)
            )

    @property
    def place(self) -> Place:
        return self._place

    def update_weights(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        self._require_awake()
        try:
            receipt = self._send(update)
        except EngineError as error:  # it broke off after a part was applied, or vLLM is gone
            self._version = NO_WEIGHTS
            if isinstance(update, StreamOffer):
                with contextlib.suppress(RuntimeError):  # the learner may be gone too
                    give_up(update, str(error))
            raise
        self._version = receipt.version
        return receipt

    def _send(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        what, limit = "update_weights", self._call_timeout_s
        if isinstance(update, StreamOffer):
            receipt: WeightReceipt = self._get(self._actor.take.remote(update), limit, what)
            return receipt
        if not isinstance(update, WeightUpdate):
            raise TypeError(
                f"{type(update).__name__} cannot leave this process, and vLLM runs in another one; "
                "send a WeightUpdate or the offer of a WeightSender"
            )
        for chunk in update.split(CHUNK_BYTES):
            self._get(self._actor.stage.remote(chunk), limit, what)
        applied: WeightReceipt = self._get(self._actor.apply.remote(), limit, what)
        return applied

    def attest(self) -> Attestation:
        self._require_awake()
        attestation: Attestation = self._get(self._actor.attest.remote(), self._call_timeout_s, "attest")
        return attestation

    def sleep(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep(level={level}): 1 frees the KV cache and parks weights, 2 drops both")
        self._require_open()
        if self.device == "cpu" or not self._options.sleep_mode:
            raise EngineError(
                "sleep needs a GPU and the option sleep_mode=True; vLLM on CPU cannot give memory back"
            )
        self._get(self._actor.sleep.remote(level), self._call_timeout_s, "sleep")
        self._asleep = True
        if level == 2:
            self._version = NO_WEIGHTS

    def wake(self) -> None:
        self._require_open()
        if self._asleep:
            self._get(self._actor.wake.remote(), self._call_timeout_s, "wake")
            self._asleep = False

    def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):  # a Ray that has been shut down has killed the actor already
                ray.kill(self._actor)
        self._actor = None
        self._version = NO_WEIGHTS
        self._directory.cleanup()

    def _get(self, reference: Any, timeout_s: float, what: str) -> Any:
        """ray.get with our errors: what the worker refused is raised as it is; a dead or silent worker
        ends the engine.
        """
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            self.close()
            raise EngineError(
                f"vLLM did not answer {what} within {timeout_s:.0f} s and was killed: make a new engine"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, WeightSyncError | EngineError | PromptError | SamplingParamsError):
                raise error.cause from None
            self.close()
            raise EngineError(f"vLLM failed in {what} and was stopped: {error}") from error
        except RayActorError as error:
            self.close()
            raise EngineError(f"the vLLM process died in {what}: {error}; make a new engine") from error

    def _require_open(self) -> None:
        if self._actor is None:
            raise EngineError("the engine is closed: make a new one")

    def _require_awake(self) -> None:
        self._require_open()
        if self._asleep:
            raise EngineError("the engine sleeps: call wake() first")


def _request_seed(seed: Sequence[int], child: int) -> int:
    """A 63-bit seed for completion `child`, from numpy's SeedSequence: neighbouring seeds do not overlap."""
    low, high = np.random.SeedSequence([*seed, child]).generate_state(2, np.uint32)
    return int(low) | (int(high) >> 1) << 32


def _config_directory(path: Path | None, config: Any) -> Any:
    """A temporary directory with config.json (and the tokenizer, where there is one) for vLLM to start from."""
    directory = tempfile.TemporaryDirectory(prefix="rllib_llm_vllm_")
    config.save_pretrained(directory.name)
    if path is not None:
        for file in path.iterdir():
            if (
                file.is_file()
                and file.suffix in (".json", ".model", ".jinja", ".txt")
                and file.name != "config.json"
            ):
                shutil.copyfile(file, Path(directory.name) / file.name)
    return directory
