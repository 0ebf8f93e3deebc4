"""Dense decoder-only language models (Llama, Mistral, Qwen2, Qwen3), one code for learner and embedded engine.

Built only from `precision_kernels` operators, each called with the formats of the `Plan`. On CPU the operators
are row-invariant: the bits of a token's hidden state depend on the tokens before it, not on how the batch was
packed, chunked or cached, nor on the number of threads. That is why decode in an engine and the packed forward
of the learner agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from precision_kernels import AttentionLayout, rotary_cos_sin
from precision_policies import AdapterSpec, Plan, PrecisionPolicy, load_policy
from rllib_llm.models.adapters import attach_adapters, initialise_adapters
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.decoder import Context, Decoder, DecoderLayer
from rllib_llm.models.kv_cache import CacheView
from rllib_llm.models.layers import PlannedLinear, PlannedModule, Side, rollout_specs
from rllib_llm.models.sampling_distribution import logprobs_of
from rllib_llm.weights.format import TensorSpec, hash_tensors

LOGITS_CHUNK_ELEMENTS = 1 << 26
"""Most fp32 logits that `CausalLM.token_logprobs` holds at once (256 MiB); more rows are recomputed in backward."""


class _Rotation:
    """Rotary table in the compute dtype, grown on demand (an entry's bits do not depend on the table's length)."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self.architecture, self.dtype = architecture, dtype
        self._inverse = architecture.rope.inverse_frequencies(architecture.head_dim)
        self._table: torch.Tensor | None = None

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """cos | sin [P, D] covering `positions`, on their device."""
        needed = int(positions.max()) + 1
        table = self._table
        if table is None or table.shape[0] < needed or table.device != positions.device:
            if needed > self.architecture.max_positions:
                raise ValueError(
                    f"position {needed - 1} is beyond the model's max_position_embeddings "
                    f"({self.architecture.max_positions})"
                )
            length = min(self.architecture.max_positions, max(1024, 1 << (needed - 1).bit_length()))
            with torch.inference_mode(False):  # training saves the table, of that mode it could not
                scaling = self.architecture.rope.attention_factor
                table = rotary_cos_sin(self._inverse.to(positions.device), length, self.dtype, scaling)
            self._table = table
        return table


class CausalLM(nn.Module):
    """A language model that computes as `plan` says for its `side`.

    Parameters (train side) or buffers (rollout side) carry Hugging Face names, see `rllib_llm.models.layers`. Make
    one with `build_model` or `rllib_llm.models.checkpoint.load_pretrained`; the constructor leaves tensors
    uninitialised.

    Args:
        config: transformers PretrainedConfig of a supported architecture (kept for `save_pretrained`).
        plan: ``policy.resolve(config)``.
        side: "train" (parameters in the master dtype, differentiable) or "rollout" (received tensors).
        gradient_checkpointing: keep only each layer's input for backward and recompute the rest: same bits.

    Raises:
        ArchitectureError: lists what of the config is not implemented.
    """

    def __init__(
        self,
        config: Any,
        plan: Plan,
        policy: PrecisionPolicy,
        side: Side = "train",
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = Architecture.from_config(config)
        self.config, self.plan, self.policy, self.side = config, plan, policy, side
        self.gradient_checkpointing = gradient_checkpointing
        self.source_path: Path | None = None
        # A base under adapters has no master weights: what is made here is only the modules.
        with torch.device("meta") if plan.adapter and side == "train" else nullcontext():
            self.model = Decoder(self.architecture, plan, policy, side)
            self.lm_head = PlannedLinear(plan["lm_head"], policy, side, tied=self.architecture.tied)
        attach_adapters(self)
        self.compute_dtype = self.model.embed_tokens.compute_dtype
        self._rotation = _Rotation(self.architecture, self.compute_dtype)

    def forward(self, batch: PackedBatch, cache: CacheView | None = None) -> torch.Tensor:
        """Final hidden states [T, H] in the compute dtype.

        Args:
            batch: T packed tokens; without a cache every sequence starts at position 0.
            cache: rows to read and extend; sequence b continues its row at its first position.
        """
        layout = self._layout(batch, cache)
        context = Context(batch, self._rotation.table(batch.positions), layout)
        x, residual = self.model.embed_tokens(batch.input_ids), None
        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and cache is None
        for index, layer in enumerate(self.model.layers):
            rows = None if cache is None else cache.layers[index]
            if recompute:
                x, residual = checkpoint(
                    layer, x, residual, context, rows, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, residual = layer(x, residual, context, rows)
        hidden, _ = self.model.norm.add(x, residual)
        return hidden

    @staticmethod
    def _layout(batch: PackedBatch, cache: CacheView | None) -> AttentionLayout:
        if cache is not None:
            return cache.layout(batch)
        starts = batch.positions[batch.cu_seqlens[:-1]]
        if bool((starts != 0).any()):
            raise ValueError(
                f"sequences start at positions {starts[starts != 0][:8].tolist()} but there is no cache "
                f"that holds what "
                "comes before: give the cache, or whole sequences"
            )
        return AttentionLayout(batch.cu_seqlens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> fp32 [T, V]."""
        return self.lm_head.logits(hidden, self.model.embed_tokens.weight if self.architecture.tied else None)

    def token_logprobs(
        self,
        hidden: torch.Tensor,
        target_ids: torch.Tensor,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        *,
        banned_ids: Sequence[int] = (),
        banned_rows: torch.Tensor | None = None,
        return_entropy: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of `target_ids` under the distribution that is sampled from.

        The same function of the same logits as in the engines (`rllib_llm.models.sampling_distribution`). Rows are
        taken in chunks whose logits are recomputed in backward when they would exceed `LOGITS_CHUNK_ELEMENTS`.

        Args:
            hidden: [T, H], hidden[t] predicts target_ids[t].
            target_ids: int64 [T].
            temperature, top_k, top_p, banned_ids, banned_rows: how the targets were sampled.
            return_entropy: also the entropy in nats.

        Returns:
            fp32 [T], or (fp32 [T], fp32 [T]); differentiable.
        """

        def chunk(part: slice, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            banned = None if banned_rows is None else banned_rows[part]
            return logprobs_of(
                self.logits(h), target_ids[part], temperature, top_k, top_p, banned_ids, banned
            )

        parts = _row_chunks(hidden.shape[0], self.architecture.vocab)
        if len(parts) == 1 or not torch.is_grad_enabled():
            pairs = [chunk(part, hidden[part]) for part in parts]
        else:
            pairs = [checkpoint(chunk, part, hidden[part], use_reentrant=False) for part in parts]
        logp = torch.cat([pair[0] for pair in pairs])
        return (logp, torch.cat([pair[1] for pair in pairs])) if return_entropy else logp

    # ------------------------------------------------------------------ weights

    def planned_modules(self) -> Iterator[tuple[str, PlannedModule]]:
        """(HF name, module) of every module that owns tensors."""
        for name, module in self.named_modules():
            if isinstance(module, PlannedModule) and self.plan[name].tied_to is None:
                yield name, module

    def initialise(self, seed: int) -> None:
        """Random weights for training from scratch: normal(0, initializer_range), norms 1, biases 0, new adapters."""
        self._require_side("train", "initialise")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, module in self.planned_modules():
                if self.plan[name].kind == "adapter":
                    continue
                if self.plan[name].kind == "norm":
                    module.set_master("weight", torch.ones(module.weight.shape))
                else:
                    values = (
                        torch.randn(module.weight.shape, generator=generator) * self.architecture.init_std
                    )
                    module.set_master("weight", values)
                if module.bias is not None:
                    module.set_master("bias", torch.zeros(module.bias.shape))
        initialise_adapters(self, seed=seed)

    def masters(self) -> Iterator[tuple[str, PlannedModule, str]]:
        """(name, module, the module's name for it) of every parameter of the train side."""
        for name, module in self.planned_modules():
            for suffix, _ in module.named_parameters(recurse=False):
                yield f"{name}.{suffix}", module, suffix

    def base(self) -> Iterator[tuple[str, PlannedModule, str]]:
        """As `masters`, of every tensor of a checkpoint of the model without adapters, frozen or not."""
        for name, module in self.planned_modules():
            for suffix in ("weight", "bias") if self.plan[name].kind != "adapter" else ():
                if getattr(module, suffix) is not None:
                    yield f"{name}.{suffix}", module, suffix

    def _require_side(self, side: Side, what: str) -> None:
        if self.side != side:
            raise ValueError(f"{what} needs a model of side {side!r}, this one is of side {self.side!r}")

    def forget_operands(self, adapters_only: bool = False) -> None:
        """Drop quantised and aligned copies of all weights, after changes that autograd does not count (`.data`)."""
        for _, module in self.named_modules():
            if isinstance(module, PlannedModule) and not (adapters_only and module.plan.kind != "adapter"):
                module.forget_operands()

    def fuse_operators(self) -> None:
        """Rollout side: let neighbouring operators of a layer share a launch (`DecoderLayer.fuse`); same bits.

        For engines that need the speed; `rllib_llm.mismatch` traces the operators one by one.
        """
        self._require_side("rollout", "fusing operators")
        for layer in self.model.layers:
            cast(DecoderLayer, layer).fuse()

    def rollout_tensors(
        self, again: bool = False, adapters_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything the rollout side needs, quantised here from the master weights.

        adapters_only: without the frozen base, which the rollout side holds already.

        again: a further reading of the same weights. What the one before quantised is read again, and the next forward
            multiplies by it too; without, changes that autograd does not count (`.data`) are looked for as well.
        """
        self._require_side("train", "exporting weights")
        if not again:
            self.forget_operands(adapters_only)
        for name, module in self.planned_modules():
            if adapters_only and self.plan[name].kind != "adapter":
                continue
            for suffix, tensor in module.export().items():
                yield f"{name}.{suffix}", tensor

    def load_rollout_tensors(
        self, tensors: Iterable[tuple[str, torch.Tensor]], adapters_only: bool = False
    ) -> None:
        """Copy received tensors, already verified (`rllib_llm.sync.verify`), into this rollout model's buffers.

        adapters_only: the base is not among them.
        """
        self._require_side("rollout", "loading exported weights")
        buffers = dict(self.named_buffers())
        with torch.no_grad():
            for name, tensor in tensors:
                buffers[name].copy_(tensor)
        self.forget_operands(adapters_only)

    def weight_hashes(self) -> dict[str, str]:
        """Name -> hash of the tensors that this rollout model holds, taken from its own memory."""
        self._require_side("rollout", "hashing held weights")
        return hash_tensors(dict(self.named_buffers()))

    def weight_specs(self) -> dict[str, TensorSpec]:
        """Name -> dtype and shape of every tensor of a `WeightUpdate` for this model, on either side."""
        specs: dict[str, TensorSpec] = {}
        for row in self.plan.modules:
            if row.tied_to is None:
                specs |= {f"{row.name}.{suffix}": s for suffix, s in rollout_specs(row, self.policy).items()}
        return specs


def _row_chunks(rows: int, vocab: int) -> list[slice]:
    """Slices of the rows whose logits stay within `LOGITS_CHUNK_ELEMENTS`; one, if empty, without rows."""
    length = max(1, LOGITS_CHUNK_ELEMENTS // vocab)
    return [slice(start, start + length) for start in range(0, max(1, rows), length)]


def build_model(
    config: Any,
    policy: Any,
    side: Side = "train",
    *,
    gradient_checkpointing: bool = False,
    adapter: AdapterSpec | None = None,
) -> CausalLM:
    """A model with uninitialised weights: `policy` (whatever `load_policy` takes) resolved on `config`.

    adapter: low-rank adapters, on a base that is frozen on the train side (`rllib_llm.models.adapters`).
    """
    policy = load_policy(policy)
    plan = policy.resolve(config, adapter)
    return CausalLM(config, plan, policy, side, gradient_checkpointing=gradient_checkpointing)
