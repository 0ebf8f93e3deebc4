"""The embedded engine: batched generation on the learner's own module code, in this process, on CPU or GPU.

Under a policy with `exactly_on_policy` its log-probs are bit-equal to the learner's packed forward on CPU, for any
batch composition, prefill chunking and number of threads, because both call the same row-invariant operators on
the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
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
    refuse_params,
)
from rllib_llm.engines.generation import Generation, Limits
from rllib_llm.engines.sampler import sequence_seeds
from rllib_llm.engines.state import EngineState, require_idle, require_sleep_level
from rllib_llm.engines.stopping import StopRule, TokenDecoder, ids_of_model, stop_id_problems
from rllib_llm.errors import EngineError
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.checkpoint import eos_token_ids, load_pretrained, load_tokenizer, model_config
from rllib_llm.models.kv_cache import DecoderCache
from rllib_llm.process.allocator import keep_freed_memory
from rllib_llm.process.attest import build_attestation
from rllib_llm.sync.base import holds_base
from rllib_llm.sync.packed import WeightUpdate
from rllib_llm.sync.receiver import Incoming
from rllib_llm.sync.stream import Groups, StreamOffer
from rllib_llm.sync.take import take_update
from rllib_llm.sync.topology import Place, place_of
from rllib_llm.sync.verify import WeightReceipt

_CAPACITY_STEP = 64  # caches of nearby sizes are shared between calls
_MAX_NUM_SEQS, _MAX_PREFILL_TOKENS = 128, 4096


class TorchEngine(RolloutEngine):
    """See the module docstring; options are keyword arguments.

    Args:
        model: a model directory or shipped name (its weights are loaded, version 0), or a transformers config (the
            first `update_weights` brings the weights).
        policy: what `precision_policies.load_policy` takes.
        load_weights: False ignores the weights of a model directory and waits for the first update.
        tokenizer: for stop strings; default: that of the model directory, loaded when first needed.
        eos_token_id: id or ids that end a completion; default: the model's generation_config / config.
        max_model_len: context in tokens; default and upper bound: the model's max_position_embeddings.
        max_num_seqs: most sequences decoded at once.
        max_prefill_tokens: most prompt tokens of one forward; longer prompts are chunked.
        kv_cache_bytes: bound of the KV cache; lowers the number of concurrent sequences when needed.
        device: "cpu" or "cuda".
        allow_other_policy: load a registered model under a policy other than its own, which is refused otherwise.
        adapter: low-rank adapters on the model; from a directory they start as new ones.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        *,
        load_weights: bool = True,
        tokenizer: TokenDecoder | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = _MAX_NUM_SEQS,
        max_prefill_tokens: int = _MAX_PREFILL_TOKENS,
        kv_cache_bytes: int = 4 << 30,
        device: str | torch.device = "cpu",
        allow_other_policy: bool = False,
        adapter: AdapterSpec | None = None,
    ) -> None:
        _check_options(
            max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens, kv_cache_bytes=kv_cache_bytes
        )
        self.policy: PrecisionPolicy = load_policy(policy)
        self.device = torch.device(device)
        self._state = EngineState()
        if self.device.type == "cpu":
            keep_freed_memory()
        self._path, self._config = model_config(model)
        self._adapter = adapter
        self._model: CausalLM | None = self._first_model(load_weights, allow_other_policy)
        self._tokenizer = tokenizer
        named = eos_token_ids(self._config, self._path)
        self._eos = (
            named if eos_token_id is None else ids_of_model(eos_token_id, self.model.architecture.vocab)
        )
        self.max_model_len = context_length(max_model_len, self.model.architecture.max_positions)
        self.max_num_seqs, self.max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self.kv_cache_bytes = kv_cache_bytes
        self._cache: DecoderCache | None = None
        self._place = place_of(self.device)
        self._groups = Groups()
        self._running: Generation | None = None
        self._requests: dict[int, int] = {}  # id -> number in `_running`
        self._next_id = 0

    @classmethod
    def largest_step(cls, options: Mapping[str, Any]) -> StepSize:
        return StepSize(
            options.get("max_num_seqs", _MAX_NUM_SEQS), options.get("max_prefill_tokens", _MAX_PREFILL_TOKENS)
        )

    def _first_model(self, load_weights: bool, allow_other_policy: bool) -> CausalLM:
        if self._path is None or not load_weights:
            return self._empty_model().to(self.device)
        loaded = load_pretrained(
            self._path,
            self.policy,
            "rollout",
            allow_other_policy=allow_other_policy,
            adapter=self._adapter,
        )
        self._state.version = CHECKPOINT_VERSION
        return loaded.to(self.device)

    def _empty_model(self) -> CausalLM:
        return build_model(self._config, self.policy, "rollout", adapter=self._adapter)

    @property
    def weights_version(self) -> int:
        return self._state.version

    @property
    def model(self) -> CausalLM:
        """The module; EngineError after `close`, and while ``sleep(level=2)`` lasts."""
        if self._model is None:
            self._state.require_awake()
        assert self._model is not None, "an engine that is awake has a module"
        return self._model

    # ------------------------------------------------------------------ generation

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        self._state.require_weights()
        self._state.require_sampling()
        require_idle(self._requests)
        self._check_request(prompts, params)
        if not prompts:
            return []
        wanted = min(self.max_num_seqs, len(prompts) * params.n)
        run = self._generation(max(map(len, prompts)), wanted, params)
        run.add(prompts, sequence_seeds(len(prompts), params.seed, seeds))
        with torch.no_grad():
            return run.run()

    def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[int]:
        self._state.require_weights()
        self._check_request(prompts, params)
        rows = sequence_seeds(len(prompts), params.seed, seeds)
        if not prompts:
            return []
        if self._running is None:
            # Any prompt may follow, so a slot holds a whole context.
            self._running = self._generation(self.max_model_len, self.max_num_seqs, params)
        check_same_params(self._running.params, params)
        numbers = self._running.add(prompts, rows)
        ids = list(range(self._next_id, self._next_id + len(numbers)))
        self._next_id += len(numbers)
        self._requests |= dict(zip(ids, numbers, strict=True))
        return ids

    def collect(self, timeout_s: float) -> dict[int, list[Completion]]:
        self._state.require_awake()
        deadline = time.monotonic() + timeout_s
        finished: dict[int, list[Completion]] = {}
        try:
            with torch.no_grad():
                while self._running is not None and not finished and not self._state.paused:
                    self._running.step()
                    finished = self._running.take_finished()
                    if time.monotonic() > deadline:
                        break
        except BaseException:  # half-done sequences are not gone on with
            self._drop_requests()
            raise
        ids = {number: request for request, number in self._requests.items()}
        done = {ids[number]: row for number, row in finished.items()}
        self._forget_requests(done)
        return done

    def abort(self, requests: Sequence[int] | None = None) -> list[int]:
        self._state.require_open()
        ended = pending_of(self._requests, requests)
        for request in ended:
            assert self._running is not None, "a pending request runs"
            self._running.drop(self._requests[request])
        self._forget_requests(ended)
        return ended

    def pause(self) -> None:
        self._state.require_open()
        self._state.paused = True

    def resume(self) -> None:
        self._state.require_open()
        self._state.paused = False

    @property
    def pending(self) -> int:
        return len(self._requests)

    def _forget_requests(self, ids: Iterable[int]) -> None:
        for request in list(ids):
            del self._requests[request]
        if not self._requests:
            self._running = None

    def _drop_requests(self) -> None:
        self._requests.clear()
        self._running = None

    def _check_request(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        check_sampling_policy(self.policy, params)
        check_prompts(prompts, self.model.architecture.vocab, self.max_model_len)
        refuse_params(stop_id_problems(params, self._eos, self.model.architecture.vocab))

    def _generation(self, longest_prompt: int, wanted: int, params: SamplingParams) -> Generation:
        """A run without prompts yet, for at most `wanted` sequences at once."""
        stop_rule = StopRule(params, self._eos, self._stop_tokenizer() if params.stop else None)
        limits, capacity = self._limits(longest_prompt, wanted, params)
        cache = self._cache_of(limits.sequences + limits.staged, capacity)
        return Generation(self.model, cache, limits, params, stop_rule, self._state.version)

    def _limits(self, longest_prompt: int, wanted: int, params: SamplingParams) -> tuple[Limits, int]:
        """How many sequences fit into the KV budget at once, and how long a slot must be."""
        longest = min(self.max_model_len, longest_prompt + params.max_tokens)
        capacity = -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP
        per_slot = DecoderCache.bytes_per_slot(
            self.model.architecture, capacity, self.model.compute_dtype, self.device.type
        )
        affordable = self.kv_cache_bytes // per_slot
        if affordable < 2:
            raise EngineError(
                f"kv_cache_bytes={self.kv_cache_bytes} holds {affordable} sequence(s) of {longest} tokens "
                f"({per_slot} bytes "
                "each), two are needed (a prompt and one completion): raise it or lower max_tokens"
            )
        staged = min(-(-wanted // params.n), max(1, affordable // 4))
        return Limits(
            min(wanted, affordable - staged), staged, self.max_prefill_tokens, self.max_model_len
        ), capacity

    def _cache_of(self, slots: int, capacity: int) -> DecoderCache:
        """The cache of the last call when it is large enough, else a new one (the old one is freed first)."""
        if self._cache is None or self._cache.slots < slots or self._cache.capacity < capacity:
            self._cache = None
            self._cache = DecoderCache(
                self.model.architecture,
                slots,
                capacity,
                self.model.compute_dtype,
                self.device,
                self.kv_cache_bytes,
            )
        return self._cache

    def _stop_tokenizer(self) -> TokenDecoder | None:
        if self._tokenizer is None and self._path is not None:
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer

    # ------------------------------------------------------------------ weights

    @property
    def place(self) -> Place:
        return self._place

    def update_weights(self, update: WeightUpdate | Incoming | StreamOffer) -> WeightReceipt:
        self._state.require_awake()
        require_idle(self._requests)

        def begin() -> None:  # if the copying is interrupted, the engine must not sample from a mixture
            self._state.version = NO_WEIGHTS

        def finish(version: int) -> None:
            self._state.version = version

        return take_update(update, self.model, self._groups, begin, finish)

    def holds_base(self, base: str) -> bool:
        self._state.require_awake()
        return self._state.version != NO_WEIGHTS and holds_base(self.model, base)

    def attest(self) -> Attestation:
        self._state.require_awake()
        model = self.model
        held = model.weight_hashes() if self._state.version != NO_WEIGHTS else {}
        shown = {"engine": "torch", "weights_version": str(self._state.version)}
        return build_attestation(
            "rollout", self.policy, model.plan, self.device, weights=held, informational=shown
        )

    # ------------------------------------------------------------------ lifecycle

    def sleep(self, level: int = 1) -> None:
        require_sleep_level(level)
        self._state.require_open()
        require_idle(self._requests)
        self._cache = None
        self._state.asleep = True
        if level == 2:
            self._model = None
            self._state.version = NO_WEIGHTS
        elif self._model is not None and self.device.type != "cpu":
            self._model.to("cpu")
            self._model.forget_operands()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for itself, another process cannot have

    def wake(self) -> None:
        self._state.require_open()
        self._state.asleep = False
        if self._model is None:
            self._model = self._empty_model()
        self._model.to(self.device)

    def alive(self) -> bool:
        return not self._state.closed

    def close(self) -> None:
        self._state.close()
        self._cache = self._model = None
        self._groups.close()
        self._drop_requests()


def _check_options(**values: int) -> None:
    bad = [f"{name}={value}: must be a positive whole number" for name, value in values.items() if value < 1]
    if bad:
        raise ValueError("engine options refused:\n" + "\n".join(f"  - {b}" for b in bad))
