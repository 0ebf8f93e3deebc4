"""The linear layer and its three GEMMs, each in the format that a precision policy names.

=========  =========================  ==================================  ================================
GEMM       product                    fp8 (block scales)                  fp16 / bf16 / fp32
=========  =========================  ==================================  ================================
forward    y = x W^T   [M,K]x[N,K]    1x128 (along K) . 128x128           row-invariant (`invariant_matmul`)
dgrad      dx = dy W   [M,N]x[N,K]    1x128 (along N) . 128x128           library GEMM
wgrad      dW = dy^T x [M,N]x[M,K]    1x128 . 128x1 (both along M)        library GEMM, fp32 out
=========  =========================  ==================================  ================================

* W is the parameter rounded to the compute dtype; fp8 quantises that, once (`prepare_weight`). The fp8 dgrad
  multiplies by the same codes as the forward; a bf16/fp16 dgrad after an fp8 forward by the dequantised
  codes.
* y is rounded to x's dtype (``out_dtype`` for fp32 logits), then the bias is added and rounded again
  (vLLM's block-FP8 linear does the same).
* ``saved = "fp8"`` keeps codes and scales of x between forward and backward, not x: the 128x1 codes when
  wgrad is fp8 (nothing is quantised twice), else the 1x128 codes of the forward, dequantised for the wgrad.
* dx is in x's dtype, dW and dbias are fp32 (autograd casts them if the parameter is not).
* From the second micro-batch on dW can be added to ``.grad`` by the GEMM (`weight_gradient.accumulate_in_place`).
* Several linears of one input are one GEMM of each kind when their weights are joined (`prepare_joint`): y has
  the bits of each alone; dx is one sum over the outputs of all. Apart, their dx are added in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from precision_kernels import reference
from precision_kernels.autograd.prepared import (
    DTYPES,
    Codes,
    JointWeight,
    LinearFormats,
    PreparedWeight,
    prepare_weight,
)
from precision_kernels.autograd.weight_gradient import (
    Recompute,
    WeightGradient,
    if_accumulating,
    main_gradient,
    save_input,
)
from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import Quantised


@dataclass(frozen=True)
class _Call:
    """A call of `linears`, apart from the tensors that autograd differentiates. Arguments as there."""

    formats: LinearFormats
    parts: Sequence[PreparedWeight]
    joint: JointWeight | None
    quantised: Quantised | None
    out_dtype: torch.dtype
    recompute: Recompute | None


class _Operand(NamedTuple):
    """x [M, K] as GEMMs read it. forward: 1x128 codes of an fp8 forward, else x in the forward's dtype. columns: the
    128x1 codes for the weight gradient, if the same read made them.
    """

    forward: Quantised | torch.Tensor
    columns: Quantised | None = None


def _operand(
    x: torch.Tensor, formats: LinearFormats, quantised: Quantised | None, columns_too: bool
) -> _Operand:
    if formats.forward != "fp8":
        return _Operand(x.to(DTYPES[formats.forward]))
    if quantised is not None:
        return _Operand(quantised)
    codes = _quantise(x, formats, columns_too)
    assert codes.rows is not None
    return _Operand(codes.rows, codes.columns)


def _quantise(x: torch.Tensor, formats: LinearFormats, columns_too: bool) -> Codes:
    """The 1x128 codes of x [M, K] and, if ``columns_too``, its 128x1 codes from the same read."""
    device = x.device.type
    if columns_too:
        return Codes(*implementation(reference.quantise_both, device)(x, *formats.scale))
    return Codes(implementation(reference.quantise_activation, device)(x, *formats.scale))


def _product(x: Quantised | torch.Tensor, weight: PreparedWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """The forward GEMM: y [M, N] = x [M, K] . W [N, K]^T, rounded once to ``out_dtype``."""
    if isinstance(x, Quantised):
        assert weight.quantised is not None  # x is codes for an fp8 forward only
        # forward, fp8: x in 1x128 blocks along K, W in 128x128 blocks, fp32 accumulation.
        matmul = implementation(reference.block_fp8_matmul, x.codes.device.type)
        return matmul(x, weight.quantised, out_dtype)
    # forward, 16 or 32 bits: both in the forward's dtype, W packed; a row's bits do not depend on M.
    return implementation(reference.invariant_matmul, x.device.type)(x, weight.forward_operand(), out_dtype)


def _outputs(
    x: Quantised | torch.Tensor,
    parts: Sequence[PreparedWeight],
    joint: JointWeight | None,
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """y [M, Ni] of all linears: of joined weights the column slices of one product. Then each bias, rounded again."""
    if joint is None:
        outputs = [_product(x, part, out_dtype) for part in parts]
    else:
        outputs = list(_product(x, joint.whole, out_dtype).split(joint.sizes, 1))
    return [y if bias is None else y + bias.to(y.dtype) for y, bias in zip(outputs, biases, strict=True)]


class _Linears(torch.autograd.Function):
    """Several linears of one input: quantised and saved once. See the module docstring for the mathematics."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, call: _Call, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        formats, count = call.formats, len(call.parts)
        weights, biases = parameters[:count], parameters[count:]
        trained = any(w is not None and w.requires_grad for w in weights)
        columns_too = trained and call.recompute is None and formats.saved == formats.wgrad == "fp8"
        operand = _operand(x, formats, call.quantised, columns_too)
        outputs = _outputs(operand.forward, call.parts, call.joint, biases, call.out_dtype)
        ctx.set_materialize_grads(False)
        ctx.formats, ctx.parts, ctx.joint, ctx.dtype = formats, call.parts, call.joint, x.dtype
        ctx.weights = [if_accumulating(w) for w in weights]
        if trained:
            rows = operand.forward if isinstance(operand.forward, Quantised) else call.quantised
            ctx.saved, tensors = save_input(x, formats, Codes(rows, operand.columns), call.recompute)
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        joint, count = ctx.joint, len(ctx.parts)
        _, _, *needed = ctx.needs_input_grad  # of x, the call, all weights, all biases
        wanted = [dy is not None and need for dy, need in zip(grads, needed[:count], strict=True)]
        if joint is not None and any(dy is not None for dy in grads):
            # One dgrad and one wgrad over the outputs of all linears, dy [M, N1 + N2 + ...].
            target = main_gradient(ctx.weights) if all(wanted) else None
            incoming = _Incoming(joined_columns(grads, joint.sizes), joint.whole, any(wanted), target)
            dx, (dwhole,) = _gradients(ctx, [incoming])
            pieces = [None] * count if dwhole is None else dwhole.split(joint.sizes)
            dweights = [piece if want else None for piece, want in zip(pieces, wanted, strict=True)]
        else:
            dx, dweights = _gradients(
                ctx,
                [
                    _Incoming(dy, part, want, main_gradient([weight]) if want else None)
                    for dy, part, want, weight in zip(grads, ctx.parts, wanted, ctx.weights, strict=True)
                ],
            )
        dbiases = [
            dy.float().sum(0) if dy is not None and need else None
            for dy, need in zip(grads, needed[count:], strict=True)
        ]
        return dx, None, *dweights, *dbiases


class _Incoming(NamedTuple):
    """What arrives at one linear in the backward.

    dy: [M, N], None if nothing depends on its output. weight: [N, K]. wanted: whether its gradient is. target: fp32
    [N, K] that the gradient is added to; without it autograd gets the gradient.
    """

    dy: torch.Tensor | None
    weight: PreparedWeight
    wanted: bool
    target: torch.Tensor | None


def _gradients(
    ctx: Any, incoming: Sequence[_Incoming]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """dx, if it is needed, and dW fp32 [N, K] of the linears of which it is wanted; None where it went to a target."""
    formats, needs_dx = ctx.formats, ctx.needs_input_grad[0]
    # An fp8 dgrad needs the 1x128 codes of every dy; its 128x1 codes for an fp8 wgrad come from the same read.
    codes = [
        _quantise(one.dy, formats, one.wanted and formats.wgrad == "fp8")
        if one.dy is not None and needs_dx and formats.dgrad == "fp8"
        else Codes()
        for one in incoming
    ]
    dx = _input_gradient(incoming, codes, formats, ctx.dtype) if needs_dx else None
    if not any(one.wanted for one in incoming):
        return dx, [None] * len(incoming)
    weight_gradient = WeightGradient(ctx.saved, ctx.saved_tensors, formats)
    return dx, [
        weight_gradient(one.dy, of_dy.columns, one.target) if one.wanted and one.dy is not None else None
        for one, of_dy in zip(incoming, codes, strict=True)
    ]


def _input_gradient(
    incoming: Sequence[_Incoming], codes: Sequence[Codes], formats: LinearFormats, dtype: torch.dtype
) -> torch.Tensor | None:
    """dx [M, K], the sum over the linears of dy W: in fp32 if there are several, one rounding. ``codes`` of each dy."""
    arrived = [(one, of_dy) for one, of_dy in zip(incoming, codes, strict=True) if one.dy is not None]
    out_dtype = dtype if len(arrived) == 1 else torch.float32
    dx: torch.Tensor | None = None
    for one, of_dy in arrived:
        term = _dgrad(one, of_dy.rows, formats, out_dtype)
        dx = term if dx is None else dx.add_(term)
    return None if dx is None else dx.to(dtype)


def _dgrad(
    one: _Incoming, dy_rows: Quantised | None, formats: LinearFormats, out_dtype: torch.dtype
) -> torch.Tensor:
    """The dgrad GEMM: dx [M, K] = dy [M, N] . W [N, K], rounded once to ``out_dtype``."""
    assert one.dy is not None
    device = one.dy.device.type
    if dy_rows is not None:
        # dgrad, fp8: dy in 1x128 blocks along N, W in 128x128 blocks (the forward's codes after an fp8 forward).
        matmul = implementation(reference.dgrad_fp8_matmul, device)
        return matmul(dy_rows, one.weight.fp8_dgrad_operand(), out_dtype)
    # dgrad, library GEMM: both in the dgrad's dtype, W dequantised after an fp8 forward; fp32 accumulation.
    dy = one.dy.to(DTYPES[formats.dgrad])
    return implementation(reference.dgrad_matmul, device)(dy, one.weight.dgrad_operand(), out_dtype)


def joined_columns(grads: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor:
    """[M, N1 + N2 + ...] of the gradients [M, Ni], zero where there is none; halves of one matrix are not copied."""
    given = next(dy for dy in grads if dy is not None)
    offset = given.storage_offset()
    for dy, size in zip(grads, sizes, strict=True):
        if (
            dy is None
            or dy.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
            or dy.storage_offset() != offset
            or dy.stride() != (given.stride(0), 1)
        ):
            break
        offset += size
    else:
        if given.stride(0) >= sum(sizes):
            return torch.as_strided(
                given, (given.shape[0], sum(sizes)), given.stride(), given.storage_offset()
            )
    return torch.cat(
        [
            given.new_zeros(given.shape[0], size) if dy is None else dy
            for dy, size in zip(grads, sizes, strict=True)
        ],
        1,
    )


Weight = torch.Tensor | Quantised | PreparedWeight


def _ready(
    weights: Sequence[Weight],
    prepared: Sequence[PreparedWeight | None] | JointWeight | None,
    formats: LinearFormats,
    dtype: torch.dtype,
) -> list[PreparedWeight]:
    """The weights as their GEMMs read them, each as it was ``prepared`` (see `linears`) if it was."""
    given: Sequence[PreparedWeight | None]
    if isinstance(prepared, JointWeight):
        given = prepared.parts
    else:
        given = [None] * len(weights) if prepared is None else prepared
    ready = []
    for weight, one in zip(weights, given, strict=True):
        if isinstance(weight, PreparedWeight):
            ready.append(weight)
        else:
            ready.append(one if one is not None else prepare_weight(weight, formats, dtype))
    return ready


def linears(
    x: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    formats: LinearFormats,
    prepared: Sequence[PreparedWeight | None] | JointWeight | None = None,
    quantised: Quantised | None = None,
    out_dtype: torch.dtype | None = None,
    recompute: Recompute | None = None,
) -> tuple[torch.Tensor, ...]:
    """Several linears of one input x [..., K] (q, k, v or gate, up): bits as by `linear` one by one, x handled once.

    ``prepared``: `prepare_weight` of each weight, or `prepare_joint` of all (the results are then column slices of one
    matrix), to save its work; ``quantised``: the 1x128 codes of x [M, K] that a fused producer already made;
    ``recompute``: what makes x again, saved in place of its 128x1 codes.
    Raises ValueError listing everything that does not fit.
    """
    joint = prepared if isinstance(prepared, JointWeight) else None
    ready = _ready(weights, prepared, formats, x.dtype)
    parameters = [weight if isinstance(weight, torch.Tensor) else None for weight in weights]
    _check(x.shape, ready, parameters, biases, formats, quantised)
    rows, out_dtype = x.reshape(-1, x.shape[-1]), out_dtype or x.dtype
    if torch.is_grad_enabled():
        call = _Call(formats, ready, joint, quantised, out_dtype, recompute)
        outputs = _Linears.apply(rows, call, *parameters, *biases)
    else:  # nothing is kept for a gradient
        operand = _operand(rows, formats, quantised, columns_too=False)
        outputs = _outputs(operand.forward, ready, joint, biases, out_dtype)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


def linears_of_codes(
    x: Quantised,
    prepared: Sequence[PreparedWeight] | JointWeight,
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The fp8 forward of `linears` for inference, x [M, K] given as 1x128 codes only: no gradient flows."""
    joint = prepared if isinstance(prepared, JointWeight) else None
    ready = list(prepared.parts if isinstance(prepared, JointWeight) else prepared)
    formats = ready[0].formats
    _check(x.shape, ready, [None] * len(ready), biases, formats, x)
    if formats.forward != "fp8":
        raise ValueError(
            f"linears_of_codes: codes need an fp8 forward, the weights are for {formats.forward!r}"
        )
    return tuple(_outputs(x, ready, joint, biases, out_dtype))


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    formats: LinearFormats,
    prepared: PreparedWeight | None = None,
    quantised: Quantised | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K] -> [..., N] in x's dtype; differentiable in x, weight (a parameter [N, K] of any float
    dtype) and bias [N].
    """
    return linears(x, [weight], [bias], formats, [prepared], quantised, out_dtype)[0]


def _check(
    shape: torch.Size,
    ready: Sequence[PreparedWeight],
    parameters: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    formats: LinearFormats,
    quantised: Quantised | None,
) -> None:
    """Raises ValueError naming everything that does not fit x of ``shape`` [..., K]."""
    problems = []
    if len(biases) != len(ready):
        problems.append(f"{len(ready)} weights but {len(biases)} biases (give None for a linear without)")
    for i, (p, parameter) in enumerate(zip(ready, parameters, strict=True)):
        if p.formats != formats:
            problems.append(f"weight {i} was prepared for {p.formats}, not for {formats}")
        if p.shape[1] != shape[-1]:
            problems.append(f"weight {i} is {tuple(p.shape)} but x has {shape[-1]} features")
        if parameter is not None and parameter.shape != p.shape:
            problems.append(
                f"weight {i} has shape {tuple(parameter.shape)} but was prepared as {tuple(p.shape)}"
            )
    rows = math.prod(shape[:-1])
    if quantised is not None and (quantised.kind != "1x128" or tuple(quantised.shape) != (rows, shape[-1])):
        problems.append(
            f"quantised must hold x [{rows}, {shape[-1]}] in 1x128 blocks, "
            f"got {quantised.kind} {tuple(quantised.shape)}"
        )
    if problems:
        raise ValueError("linear: " + "; ".join(problems))
