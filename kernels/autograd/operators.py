"""The differentiable operators that models call: dispatch on the device, autograd around forward and backward.

Each pairs a forward with its backward of the same name in `reference` (or in the bound implementation). Model
code of learner and rollout engine calls these and nothing else, so both sides run one set of operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.dispatch import implementation
from precision_kernels.reference.adamw import AdamWStep
from precision_kernels.reference.formats import SCALE_FLOOR, Quantised, ScaleFormat
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.reference.master import LowHalf
from precision_kernels.reference.moments import Moment

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _inference_only(name: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name} returns codes, through which no gradient flows; call it under torch.no_grad(), "
            "or in training the unfused operator followed by linear(..., quantised=...)"
        )


def no_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd has nothing to record; its functions would take more host time than a launch."""
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def on_its_device(definition: Callable[_P, _R]) -> Callable[_P, _R]:
    """The operator without a gradient of its own, on the device of its first argument: signature and contract are those
    of its definition.
    """

    @functools.wraps(definition)
    def operator(*arguments: _P.args, **keywords: _P.kwargs) -> _R:
        first: Any = arguments[0] if arguments else next(iter(keywords.values()))
        return implementation(definition, first.device.type)(*arguments, **keywords)

    return operator


quantise_activation = on_its_device(reference.quantise_activation)
quantise_columns = on_its_device(reference.quantise_columns)
quantise_weight = on_its_device(reference.quantise_weight)
block_fp8_matmul = on_its_device(reference.block_fp8_matmul)
dgrad_fp8_matmul = on_its_device(reference.dgrad_fp8_matmul)
wgrad_fp8_matmul = on_its_device(reference.wgrad_fp8_matmul)
invariant_matmul = on_its_device(reference.invariant_matmul)
rotary_cos_sin = on_its_device(reference.rotary_cos_sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, operand: torch.Tensor
    ) -> torch.Tensor:
        y, rstd = implementation(reference.rms_norm, x.device.type)(x, operand, eps)
        ctx.save_for_backward(x, operand, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = implementation(reference.rms_norm_backward, x.device.type)(dy, x, weight, rstd)
        return dx, dweight, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        operand: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, summed, rstd = implementation(reference.add_rms_norm, x.device.type)(x, residual, operand, eps)
        ctx.save_for_backward(summed, operand, rstd)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dsummed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summed, weight, rstd = ctx.saved_tensors
        dx, dweight = implementation(reference.rms_norm_backward, summed.device.type)(
            dy, summed, weight, rstd, dsummed
        )
        return dx, dx, dweight, None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, operand: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm over the last dimension of x [..., D]; also the per-head q/k norm. Definition in `reference.norm`.

    ``operand``: what is multiplied by, if that is not ``weight`` itself but its rounding, [D] in any float dtype; the
    gradient, unrounded, is the weight's all the same.
    """
    operand = weight if operand is None else operand
    if no_gradient(x, weight):
        return implementation(reference.rms_norm, x.device.type)(x, operand, eps)[0]
    return _RMSNorm.apply(x, weight, eps, operand)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    operand: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to their dtype; ``operand`` as in `rms_norm`. Definition in
    `reference.norm`.
    """
    operand = weight if operand is None else operand
    if no_gradient(x, residual, weight):
        return implementation(reference.add_rms_norm, x.device.type)(x, residual, operand, eps)[:2]
    return _AddRMSNorm.apply(x, residual, weight, eps, operand)


def rms_norm_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> Quantised:
    """`quantise_activation` of `rms_norm`, for inference; x [M, D]."""
    _inference_only("rms_norm_quantise", x, weight)
    return implementation(reference.rms_norm_quantise, x.device.type)(
        x, weight, eps, scale_format, scale_floor
    )[0]


def add_rms_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> tuple[Quantised, torch.Tensor]:
    """(`quantise_activation` of the norm, new residual), for inference; x, residual [M, D]."""
    _inference_only("add_rms_norm_quantise", x, residual, weight)
    fused = implementation(reference.add_rms_norm_quantise, x.device.type)
    return fused(x, residual, weight, eps, scale_format, scale_floor)[:2]


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        saved: str,
        scale_format: ScaleFormat,
        scale_floor: float,
    ) -> torch.Tensor:
        ctx.scale_format = scale_format if saved == "fp8" else None
        if ctx.scale_format is None:
            ctx.save_for_backward(gate, up)
            return implementation(reference.silu_mul, gate.device.type)(gate, up)
        saving = implementation(reference.silu_mul_saving, gate.device.type)
        y, *codes = saving(gate, up, scale_format, scale_floor)
        ctx.save_for_backward(*(t for q in codes for t in (q.codes, q.scales)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, device = ctx.saved_tensors, dy.device.type
        if ctx.scale_format is None:
            return *implementation(reference.silu_mul_backward, device)(dy, *saved), None, None, None
        gate = Quantised(saved[0], saved[1], "1x128", ctx.scale_format)
        up = Quantised(saved[2], saved[3], "1x128", ctx.scale_format)
        return *implementation(reference.silu_mul_backward_saved, device)(dy, gate, up), None, None, None


def silu_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    saved: str = "bf16",
    scale_format: ScaleFormat = "fp32",
    scale_floor: float = SCALE_FLOOR,
) -> torch.Tensor:
    """silu(gate) * up; definition in `reference.activation`.

    The product is recomputed in the backward from gate and up; ``saved="fp8"`` keeps only their 1x128 codes
    and scales (the gradient is then that of the dequantised values), anything else the tensors themselves.
    """
    if no_gradient(gate, up):
        return implementation(reference.silu_mul, gate.device.type)(gate, up)
    return _SiluMul.apply(gate, up, saved, scale_format, scale_floor)


def silu_mul_quantise(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """`quantise_activation` of `silu_mul`, for inference; gate, up [M, F]."""
    _inference_only("silu_mul_quantise", gate, up)
    return implementation(reference.silu_mul_quantise, gate.device.type)(gate, up, scale_format, scale_floor)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(positions, cos_sin)
        return implementation(reference.rotary, q.device.type)(q, k, positions, cos_sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, cos_sin = ctx.saved_tensors
        backward = implementation(reference.rotary_backward, dq.device.type)
        return *backward(dq, dk, positions, cos_sin), None, None


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of q [T, H, D] and k [T, Hkv, D] at positions [T]; definition in `reference.rotary`."""
    if no_gradient(q, k):
        rotated_q, rotated_k = implementation(reference.rotary, q.device.type)(q, k, positions, cos_sin)
        return rotated_q, rotated_k
    return _Rotary.apply(q, k, positions, cos_sin)


def norm_rotary(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    positions: torch.Tensor, cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`rotary` of the heads of `rms_norm`, for inference: q [T, H, D], k [T, Hkv, D], weights [D]; bits of the two."""
    _inference_only("norm_rotary", q, k, q_weight, k_weight)
    fused = implementation(reference.norm_rotary, q.device.type)
    return fused(q, k, q_weight, k_weight, eps, positions, cos_sin)


def allocate_kv_cache(
    rows: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype,
    device: torch.device | str = "cpu",
) -> reference.KVCache:
    """The key/value cache of one layer that `attention` on this device understands.

    It has ``max_len``, ``copy_rows(source, target)`` and nothing else that callers may touch. ``storage``
    is the compute dtype; on CPU float64 is also possible (same bits, 4x the memory, faster decode).
    """
    return implementation(reference.allocate_kv_cache, torch.device(device).type)(
        rows, max_len, kv_heads, head_dim, storage, device
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: AttentionLayout,
        scale: float | None,
    ) -> torch.Tensor:
        o, lse = implementation(reference.attention, q.device.type)(q, k, v, layout, None, scale)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backward = implementation(reference.attention_backward, do.device.type)
        q, k, v, o, lse = ctx.saved_tensors
        return *backward(do, q, k, v, o, lse, ctx.layout, ctx.scale), None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    cache: reference.KVCache | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention over packed sequences; definition in `reference.attention`.

    q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]. One function for the training forward (no cache;
    differentiable), prefill, chunked prefill and decode (cache from `allocate_kv_cache`, which the call
    appends k and v to; the caller advances ``cached`` in its next layout). The bits of a row are the same
    in all of them.
    """
    if cache is None and not no_gradient(q, k, v):
        return _Attention.apply(q, k, v, layout, scale)
    _inference_only("attention with a cache", q, k, v)
    return implementation(reference.attention, q.device.type)(q, k, v, layout, cache, scale)[0]


def tensor_digest(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None) -> torch.Tensor:
    """Tensors (or parts of tensors) of one device -> checksum lanes int64 [n, 2]; definition in `reference.digest`."""
    device = tensors[0].device.type if tensors else "cpu"
    return implementation(reference.tensor_digest, device)(tensors, starts)


@torch.no_grad()
def adamw(
    weight: torch.Tensor,
    low_half: LowHalf | None,
    gradient: torch.Tensor,
    mean: Moment,
    square: Moment,
    step: AdamWStep,
) -> None:
    """One AdamW update of a weight and its moments, in place; definition in `reference.adamw`."""
    implementation(reference.adamw, weight.device.type)(weight, low_half, gradient, mean, square, step)
