"""The layers of a dense decoder, named as Hugging Face names them; families: `precision_policies.models.FAMILIES`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from precision_kernels import (
    AttentionLayout,
    Coded,
    Quantised,
    Recompute,
    attention,
    gated_feed_forward,
    gated_feed_forward_problems,
    norm_rotary,
    readable_as_codes,
    rotary,
    rotary_of_projections,
    silu_mul,
    silu_mul_quantise,
)
from precision_policies import Plan, PrecisionPolicy
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.joint import JointProjections
from rllib_llm.models.layers import (
    PlannedEmbedding,
    PlannedLinear,
    PlannedNorm,
    ScaleFormat,
    Side,
    scale_rule,
)


class Context:
    """What all layers of one forward share: positions, rotary table, attention layout."""

    def __init__(self, batch: PackedBatch, table: torch.Tensor, layout: AttentionLayout) -> None:
        self.positions, self.table, self.layout = batch.positions, table, layout

    def layout_within(self, window: int) -> AttentionLayout:
        """What a query of a layer sees: with a window its last tokens, with 0 all before it."""
        return self.layout.within(window)


class SelfAttention(nn.Module):
    """Projections, per-head norms where the family has them, rotation, causal attention."""

    def __init__(
        self, name: str, arch: Architecture, plan: Plan, policy: PrecisionPolicy, side: Side
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = arch.heads, arch.kv_heads, arch.head_dim
        self.q_proj = PlannedLinear(plan[f"{name}.q_proj"], policy, side)
        self.k_proj = PlannedLinear(plan[f"{name}.k_proj"], policy, side)
        self.v_proj = PlannedLinear(plan[f"{name}.v_proj"], policy, side)
        self.o_proj = PlannedLinear(plan[f"{name}.o_proj"], policy, side)
        self.qkv = JointProjections((self.q_proj, self.k_proj, self.v_proj))
        self.window = 0  # how many tokens a query sees; 0: all before it
        self.qk_norm = arch.qk_norm
        self.fuse_norm_rotary = False
        if arch.qk_norm:
            self.q_norm = PlannedNorm(plan[f"{name}.q_norm"], policy, side, arch.rms_eps)
            self.k_norm = PlannedNorm(plan[f"{name}.k_norm"], policy, side, arch.rms_eps)

    def forward(
        self,
        x: torch.Tensor | Quantised | Coded,
        context: Context,
        cache: Any,
        recompute: Recompute | None = None,
    ) -> torch.Tensor:
        """[T, H], or its codes -> [T, H]; ``recompute``: how x can be made again."""
        q, k, v = self.qkv(x, recompute)
        q = q.view(-1, self.heads, self.head_dim)
        k, v = k.view(-1, self.kv_heads, self.head_dim), v.view(-1, self.kv_heads, self.head_dim)
        if v.requires_grad and not self.qk_norm:
            q, k, v = rotary_of_projections(q, k, v, context.positions, context.table)
        else:
            q, k = self._rotate(q, k, context)
        out = self.attend(q, k, v, context, cache)
        out = out.reshape(out.shape[0], -1)
        return self.o_proj(out, Recompute.of_saved(out))  # the attention keeps its result

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads normalised, where the family does that, and turned to their positions."""
        if self.qk_norm and self.fuse_norm_rotary:
            weights = self.q_norm.weight, self.k_norm.weight
            return norm_rotary(q, k, *weights, self.q_norm.eps, context.positions, context.table)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotary(q, k, context.positions, context.table)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, cache: Any
    ) -> torch.Tensor:
        """q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]. An engine with its own paged cache puts its attention here."""
        return attention(q, k, v, context.layout_within(self.window), cache)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, name: str, plan: Plan, policy: PrecisionPolicy, side: Side) -> None:
        super().__init__()
        self.gate_proj = PlannedLinear(plan[f"{name}.gate_proj"], policy, side)
        self.up_proj = PlannedLinear(plan[f"{name}.up_proj"], policy, side)
        self.down_proj = PlannedLinear(plan[f"{name}.down_proj"], policy, side)
        self.gate_up = JointProjections((self.gate_proj, self.up_proj))
        self.quantise_product = False
        self.saved: tuple[str, ScaleFormat, float] = (policy.activation.saved, *scale_rule(policy))
        self._fits: bool | None = None

    def forward(
        self, x: torch.Tensor | Quantised | Coded, recompute: Recompute | None = None
    ) -> torch.Tensor:
        """[T, H], or its codes -> [T, H]; ``recompute``: how x can be made again."""
        if not isinstance(x, Quantised) and torch.is_grad_enabled() and self._one_function():
            weights = [m.weight for m in (self.gate_proj, self.up_proj, self.down_proj)]
            return gated_feed_forward(
                x, weights, self.gate_up.prepared(), self.down_proj.prepared(), recompute
            )
        gate, up = self.gate_up(x, recompute)
        if self.quantise_product:
            return self.down_proj(silu_mul_quantise(gate, up, *self.saved[1:]))
        return self.down_proj(silu_mul(gate, up, *self.saved))

    def _one_function(self) -> bool:
        """Whether training takes the whole block at once, with the same results."""
        modules = (self.gate_proj, self.up_proj, self.down_proj)
        if not self.gate_up.joined or any(m.side != "train" or m.bias is not None for m in modules):
            return False
        weights = [m.weight for m in modules]
        if not all(w.requires_grad for w in weights):
            return False
        if self._fits is None:  # formats and shapes stay
            prepared = self.gate_up.prepared(), self.down_proj.prepared()
            self._fits = not gated_feed_forward_problems(*prepared, weights, self.saved[0])
        return self._fits


class DecoderLayer(nn.Module):
    """One pre-norm block. Input and output are (what the last sub-layer produced, residual stream before it)."""

    def __init__(
        self, index: int, arch: Architecture, plan: Plan, policy: PrecisionPolicy, side: Side
    ) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        self.self_attn = SelfAttention(f"{name}.self_attn", arch, plan, policy, side)
        self.self_attn.window = arch.windows[index] if arch.windows else 0
        self.mlp = FeedForward(f"{name}.mlp", plan, policy, side)
        eps = arch.rms_eps
        self.input_layernorm = PlannedNorm(plan[f"{name}.input_layernorm"], policy, side, eps)
        self.post_attention_layernorm = PlannedNorm(
            plan[f"{name}.post_attention_layernorm"], policy, side, eps
        )
        self.quantise_input: tuple[bool, ...] = (False, False)
        first = self.self_attn.q_proj, self.mlp.gate_proj
        self.coded_input = tuple(m.side == "train" and readable_as_codes(m.formats) for m in first)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context, cache: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, H] -> the same two for the next layer; residual is None before the first."""
        y, residual = self._normalise(0, x, residual)
        y = self.self_attn(y, context, cache, self._recompute(self.input_layernorm, residual))
        y, residual = self._normalise(1, y, residual)
        return self.mlp(y, self._recompute(self.post_attention_layernorm, residual)), residual

    @staticmethod
    def _recompute(norm: PlannedNorm, residual: torch.Tensor) -> Recompute | None:
        return norm.recompute(residual) if torch.is_grad_enabled() else None

    def _normalise(
        self, which: int, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor]:
        """Input norm (0) or the one behind attention (1), in the form in which the linears behind it read it."""
        norm = (self.input_layernorm, self.post_attention_layernorm)[which]
        if self.quantise_input[which]:
            return norm.add_quantise(x, residual)
        if torch.is_grad_enabled() and self.coded_input[which]:
            return norm.add_coded(x, residual)
        return norm.add(x, residual)

    def fuse(self) -> None:
        """Inference: norms and SiLU hand codes to fp8 linears, heads are normalised and turned at once; same bits."""
        self.self_attn.fuse_norm_rotary = True
        groups = self.self_attn.qkv.modules, self.mlp.gate_up.modules, (self.mlp.down_proj,)
        # An adapter reads values, not codes.
        *self_and_mlp, product = (
            all(m.formats.forward == "fp8" and m.adapter is None for m in group) for group in groups
        )
        self.quantise_input, self.mlp.quantise_product = tuple(self_and_mlp), product


class Decoder(nn.Module):
    """Embedding, layers, final norm: what HF names ``model.*``."""

    def __init__(self, arch: Architecture, plan: Plan, policy: PrecisionPolicy, side: Side) -> None:
        super().__init__()
        self.embed_tokens = PlannedEmbedding(plan["model.embed_tokens"], policy, side)
        self.layers = nn.ModuleList(DecoderLayer(i, arch, plan, policy, side) for i in range(arch.layers))
        self.norm = PlannedNorm(plan["model.norm"], policy, side, arch.rms_eps)
