"""The model that vLLM runs: the rollout side of `rllib_llm.models.CausalLM`, with keys and values in vLLM's pages.

Every operator but attention is the learner's, on the bytes that the learner sent. Attention is FlashAttention
on vLLM's pages on a GPU, and the reference on vLLM's pages on a CPU (`cpu_attention`). `compute_logits`
returns log-probs of the distribution to sample from (`rllib_llm.models.sampling_distribution`), so that vLLM only has
to draw from it, and what it reports as "raw logit" of the drawn token is that log-prob, computed by the
function that the learner uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from precision_kernels import log_softmax, rotary_cos_sin
from precision_kernels.hopper.attention_width import attention_width, widen_heads
from precision_policies import AdapterSpec, PrecisionPolicy
from rllib_llm.models.architecture import plain_config, refuse_windows
from rllib_llm.models.causal_lm import CausalLM
from rllib_llm.models.decoder import SelfAttention
from rllib_llm.models.sampling_distribution import SamplingDistribution, truncated_logits

CONFIG_KEY = "rllib_llm_policy"
"""Attribute of the model config (set by `hf_overrides`) that holds the policy as a dict."""
ADAPTER_KEY = "rllib_llm_adapter"
"""Attribute of the model config that holds the `AdapterSpec` as a dict, or None."""
HEAD_DIM_KEY = "rllib_llm_head_dim"
"""Attribute of the model config that holds its head_dim; `head_dim` itself tells vLLM the width of its attention."""


class _Rows:
    """What the decoder layers share: positions and rotary table; vLLM's forward context holds the rest."""

    def __init__(self, positions: torch.Tensor, table: torch.Tensor) -> None:
        self.positions, self.table = positions, table


class VLLMCausalLM(nn.Module):
    """vLLM's model interface around `CausalLM`; one tensor-parallel rank.

    Raises:
        ArchitectureError: the config is not a supported dense decoder.
        ValueError: more than one tensor- or pipeline-parallel rank.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={parallel.tensor_parallel_size}, pipeline_parallel_size="
                f"{parallel.pipeline_parallel_size}: shards would be quantised on other block boundaries; use 1 and 1"
            )
        config = copy.deepcopy(vllm_config.model_config.hf_config)
        config.head_dim = getattr(config, HEAD_DIM_KEY)
        policy = PrecisionPolicy.from_dict(getattr(config, CONFIG_KEY))
        said = getattr(config, ADAPTER_KEY, None)
        adapter = None if said is None else AdapterSpec.from_dict(said)
        config = plain_config(
            config
        )  # vLLM attaches keys of its own; the caller's were checked before it started
        self.lm = CausalLM(config, policy.resolve(config, adapter), policy, "rollout")
        refuse_windows(self.lm.architecture, vllm_config.model_config.max_model_len)
        self.lm.fuse_operators()
        for index, layer in enumerate(self.lm.model.layers):
            attention: Any = layer.self_attn
            paged = _paged_attention(attention, vllm_config, f"model.layers.{index}.self_attn.attn")
            attention.attend = paged
            self.add_module(f"attention_{index}", paged.layer)
        self.distribution = SamplingDistribution()
        """How the sequences of the present step are sampled; `banned_ids` where `below_min_tokens` says so."""
        self.below_min_tokens: Callable[[int], torch.Tensor] | None = None  # set by compat.watch_rows
        self._max_positions = vllm_config.model_config.max_model_len
        self._table: torch.Tensor | None = None

    def named_buffers(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """vLLM's own buffers, without the weights, which are buffers here too.

        vLLM copies what this yields to host memory before sleep level 2 and back when it wakes; weights are dropped
        at that level, and come with the next update.
        """
        for name, buffer in super().named_buffers(*arguments, **keywords):
            if not name.startswith("lm."):
                yield name, buffer

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, H]."""
        return self.lm.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        """Token ids and positions [T] (padded by vLLM) -> final hidden states [T, H]."""
        rows = _Rows(positions, self._rotary_table(positions.device))
        x, residual = self.embed_input_ids(input_ids), None
        for layer in self.lm.model.layers:
            x, residual = layer(x, residual, rows)
        return self.lm.model.norm.add(x, residual)[0]

    def compute_logits(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        """[N, H] -> fp32 [N, V] log-probs of the distribution to sample from; -inf outside its support."""
        drawn = self.distribution
        logits = self.lm.logits(hidden_states)
        banned_rows = None
        if drawn.banned_ids:
            assert self.below_min_tokens is not None, "the worker calls compat.watch_rows before it samples"
            banned_rows = self.below_min_tokens(len(logits))
        return log_softmax(
            truncated_logits(
                logits, drawn.temperature, drawn.top_k, drawn.top_p, None, drawn.banned_ids, banned_rows
            )
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's checkpoint loaders are not used: weights come by `WeightUpdate`
        (`rllib_llm.engines.vllm.worker`).
        """
        raise NotImplementedError(
            "weights reach this model by RolloutEngine.update_weights, start vLLM with load_format=dummy"
        )

    def _rotary_table(self, device: torch.device) -> torch.Tensor:
        """cos | sin for every position that vLLM can schedule: made once, so that CUDA graphs read one buffer."""
        if self._table is None or self._table.device != device:
            architecture = self.lm.architecture
            inverse = architecture.rope.inverse_frequencies(architecture.head_dim).to(device)
            scaling = architecture.rope.attention_factor
            self._table = rotary_cos_sin(inverse, self._max_positions, self.lm.compute_dtype, scaling)
        return self._table


class _PagedAttend:
    """`SelfAttention.attend` by a vLLM attention layer; keys and values go to vLLM's pages.

    Heads are padded to the layer's width, as the learner's attention does (`precision_kernels.hopper.attention_width`).
    """

    def __init__(self, layer: Attention, width: int) -> None:
        self.layer, self.width = layer, width

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Any, cache: Any
    ) -> torch.Tensor:
        rows, heads, head_dim = q.shape
        wide = [widen_heads(x, self.width).reshape(rows, -1) for x in (q, k, v)]
        return self.layer(*wide).view(rows, heads, self.width)[..., :head_dim]


def _paged_attention(attention: SelfAttention, vllm_config: VllmConfig, prefix: str) -> _PagedAttend:
    backend, width = None, attention_width(attention.head_dim)
    if vllm_config.device_config.device_type == "cpu":
        from rllib_llm.engines.vllm.cpu_attention import ReferenceAttentionBackend

        backend, width = ReferenceAttentionBackend, attention.head_dim
    layer = Attention(
        attention.heads,
        width,
        attention.head_dim**-0.5,
        num_kv_heads=attention.kv_heads,
        cache_config=vllm_config.cache_config,
        prefix=prefix,
        attn_backend=backend,
    )
    return _PagedAttend(layer, width)
