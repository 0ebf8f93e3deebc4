"""The differentiable operators that models call: dispatch on the device, autograd around forward and
backward.

Each pairs a forward with its backward of the same name in `reference` (or in the bound implementation). Model
code of learner and rollout engine calls these and nothing else, so both sides run one set of operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import SCALE_FLOOR, Quantised, ScaleFormat
from precision_kernels.reference.layout import AttentionLayout


def _inference_only(name: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name} returns codes, through which no gradient flows; call it under torch.no_grad(), "
            "or in training the unfused operator followed by linear(..., quantised=...)"
        )


def no_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd has nothing to record; its functions would take more host time than a launch."""
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def quantise_activation(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """x [M, K] -> 1x128 codes; definition in `reference.quantise`."""
    return implementation("quantise_activation", x.device.type)(x, scale_format, scale_floor)


def quantise_columns(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """x [M, K] -> 128x1 codes; definition in `reference.quantise`."""
    return implementation("quantise_columns", x.device.type)(x, scale_format, scale_floor)


def quantise_weight(
    w: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """w [N, K] -> 128x128 codes; definition in `reference.quantise`."""
    return implementation("quantise_weight", w.device.type)(w, scale_format, scale_floor)


def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """a [M, K] (1x128) @ b [N, K].T (128x128) -> [M, N]; definition in `reference.matmul`."""
    return implementation("block_fp8_matmul", a.codes.device.type)(a, b, out_dtype)


def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dy [M, N] (1x128) @ w [N, K] (128x128) -> [M, K]; definition in `reference.matmul`."""
    return implementation("dgrad_fp8_matmul", dy.codes.device.type)(dy, w, out_dtype)


def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """dy [M, N].T @ x [M, K] (both 128x1) -> fp32 [N, K], added to ``out`` if given; definition in
    `reference.matmul`.
    """
    return implementation("wgrad_fp8_matmul", dy.codes.device.type)(dy, x, out)


def invariant_matmul(x: torch.Tensor, w, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Row-invariant x [M, K] @ w [N, K].T; no gradient (train with `linear`); definition in
    `reference.matmul`.
    """
    return implementation("invariant_matmul", x.device.type)(x, w, out_dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, operand):
        y, rstd = implementation("rms_norm", x.device.type)(x, operand, eps)
        ctx.save_for_backward(x, operand, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = implementation("rms_norm_backward", x.device.type)(dy, x, weight, rstd)
        return dx, dweight, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, operand):
        y, summed, rstd = implementation("add_rms_norm", x.device.type)(x, residual, operand, eps)
        ctx.save_for_backward(summed, operand, rstd)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsummed):
        summed, weight, rstd = ctx.saved_tensors
        dx, dweight = implementation("rms_norm_backward", summed.device.type)(
            dy, summed, weight, rstd, dsummed
        )
        return dx, dx, dweight, None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, operand: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm over the last dimension of x [..., D]; also the per-head q/k norm. Definition in
    `reference.norm`.

    ``operand``: what is multiplied by, if that is not ``weight`` itself but its rounding, [D] in any float dtype; the
    gradient, unrounded, is the weight's all the same.
    """
    operand = weight if operand is None else operand
    if no_gradient(x, weight):
        return implementation("rms_norm", x.device.type)(x, operand, eps)[0]
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
        return implementation("add_rms_norm", x.device.type)(x, residual, operand, eps)[:2]
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
    return implementation("rms_norm_quantise", x.device.type)(x, weight, eps, scale_format, scale_floor)[0]


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
    fused = implementation("add_rms_norm_quantise", x.device.type)
    return fused(x, residual, weight, eps, scale_format, scale_floor)[:2]


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, saved, scale_format, scale_floor):
        ctx.scale_format = scale_format if saved == "fp8" else None
        if ctx.scale_format is None:
            ctx.save_for_backward(gate, up)
            return implementation("silu_mul", gate.device.type)(gate, up)
        saving = implementation("silu_mul_saving", gate.device.type)
        y, *codes = saving(gate, up, scale_format, scale_floor)
        ctx.save_for_backward(*(t for q in codes for t in (q.codes, q.scales)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, device = ctx.saved_tensors, dy.device.type
        if ctx.scale_format is None:
            return *implementation("silu_mul_backward", device)(dy, *saved), None, None, None
        gate = Quantised(saved[0], saved[1], "1x128", ctx.scale_format)
        up = Quantised(saved[2], saved[3], "1x128", ctx.scale_format)
        return *implementation("silu_mul_backward_saved", device)(dy, gate, up), None, None, None


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
        return implementation("silu_mul", gate.device.type)(gate, up)
    return _SiluMul.apply(gate, up, saved, scale_format, scale_floor)


def silu_mul_quantise(
    gate: torch.Tensor, up: torch.Tensor, scale_format: ScaleFormat = "fp32", scale_floor: float = SCALE_FLOOR
) -> Quantised:
    """`quantise_activation` of `silu_mul`, for inference; gate, up [M, F]."""
    _inference_only("silu_mul_quantise", gate, up)
    return implementation("silu_mul_quantise", gate.device.type)(gate, up, scale_format, scale_floor)


def rotary_cos_sin(
    inv_freq: torch.Tensor, max_positions: int, dtype: torch.dtype, scaling: float = 1.0
) -> torch.Tensor:
    """Table [max_positions, R] (cos | sin) rounded to ``dtype`` from inv_freq [R/2]; definition in
    `reference.rotary`.
    """
    return implementation("rotary_cos_sin", inv_freq.device.type)(inv_freq, max_positions, dtype, scaling)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, positions, cos_sin):
        ctx.save_for_backward(positions, cos_sin)
        return implementation("rotary", q.device.type)(q, k, positions, cos_sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        return *implementation("rotary_backward", dq.device.type)(dq, dk, *ctx.saved_tensors), None, None


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of q [T, H, D] and k [T, Hkv, D] at positions [T]; definition in `reference.rotary`."""
    if no_gradient(q, k):
        return implementation("rotary", q.device.type)(q, k, positions, cos_sin)
    return _Rotary.apply(q, k, positions, cos_sin)


def norm_rotary(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    positions: torch.Tensor, cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`rotary` of the heads of `rms_norm`, for inference: q [T, H, D], k [T, Hkv, D], weights [D]; bits of the two."""
    _inference_only("norm_rotary", q, k, q_weight, k_weight)
    fused = implementation("norm_rotary", q.device.type)
    return fused(q, k, q_weight, k_weight, eps, positions, cos_sin)


def allocate_kv_cache(
    rows: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype,
    device: torch.device | str = "cpu",
):
    """The key/value cache of one layer that `attention` on this device understands.

    It has ``max_len``, ``copy_rows(source, target)`` and nothing else that callers may touch. ``storage``
    is the compute dtype; on CPU float64 is also possible (same bits, 4x the memory, faster decode).
    """
    return implementation("allocate_kv_cache", torch.device(device).type)(
        rows, max_len, kv_heads, head_dim, storage, device
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout, scale):
        o, lse = implementation("attention", q.device.type)(q, k, v, layout, None, scale)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        backward = implementation("attention_backward", do.device.type)
        return *backward(do, *ctx.saved_tensors, ctx.layout, ctx.scale), None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    cache=None,
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
    return implementation("attention", q.device.type)(q, k, v, layout, cache, scale)[0]


def tensor_digest(tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None) -> torch.Tensor:
    """Tensors (or parts of tensors) of one device -> checksum lanes int64 [n, 2]; definition in
    `reference.digest`.
    """
    device = tensors[0].device.type if tensors else "cpu"
    return implementation("tensor_digest", device)(tensors, starts)
