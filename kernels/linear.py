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

import torch
from torch.autograd.function import once_differentiable

from precision_kernels.dispatch import implementation
from precision_kernels.prepared import (
    DTYPES,
    JointWeight,
    LinearFormats,
    PreparedWeight,
    prepare_weight,
)
from precision_kernels.reference.formats import Quantised
from precision_kernels.weight_gradient import Remake, kept, main_gradient, marked, weight_gradient


def _operand(x: torch.Tensor, formats: LinearFormats, quantised: Quantised | None, both: bool):
    """(What the forward multiplies: x in its dtype or 1x128 codes, given or made; and the 128x1 codes if ``both``)."""
    if formats.forward != "fp8":
        return x.to(DTYPES[formats.forward]), None
    return (quantised, None) if quantised is not None else _quantise(x, formats, both)


def _outputs(operand, prepared, joint: JointWeight | None, biases, out_dtype):
    """Forward of all linears; ``operand``: `Quantised` x for an fp8 forward, else x [M, K] in the forward's dtype."""
    if isinstance(operand, Quantised):
        matmul = implementation("block_fp8_matmul", operand.codes.device.type)
        product = lambda p: matmul(operand, p.quantised, out_dtype)  # noqa: E731
    else:
        matmul = implementation("invariant_matmul", operand.device.type)
        product = lambda p: matmul(operand, p.forward_operand(), out_dtype)  # noqa: E731
    if joint is None:
        outputs = [product(p) for p in prepared]
    else:
        outputs = list(product(joint.whole).split(joint.sizes, 1))
    return [y if b is None else y + b.to(y.dtype) for y, b in zip(outputs, biases, strict=True)]


class _Linears(torch.autograd.Function):
    """Several linears of one input: quantised and saved once. See the module docstring for the mathematics."""

    @staticmethod
    def forward(ctx, x, formats, prepared, joint, quantised, out_dtype, remake, *parameters):
        weights, biases = parameters[: len(prepared)], parameters[len(prepared) :]
        trained = any(w is not None and w.requires_grad for w in weights)
        both = trained and remake is None and formats.saved == formats.wgrad == "fp8"
        operand, columns = _operand(x, formats, quantised, both)
        quantised = operand if isinstance(operand, Quantised) else quantised
        outputs = _outputs(operand, prepared, joint, biases, out_dtype)
        ctx.set_materialize_grads(False)
        ctx.formats, ctx.prepared, ctx.joint, ctx.dtype = formats, prepared, joint, x.dtype
        ctx.saved_kind, ctx.remake, ctx.weights = "", None, [marked(w) for w in weights]
        if trained and remake is not None and formats.saved == formats.wgrad == "fp8":
            ctx.saved_kind, ctx.remake = "values", remake._replace(tensors=())
            ctx.save_for_backward(*remake.tensors)
        elif trained:
            ctx.saved_kind, tensors = kept(x, formats, quantised, columns)
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        count = len(ctx.prepared)
        wanted = [
            dy is not None and w for dy, w in zip(grads, ctx.needs_input_grad[7 : 7 + count], strict=True)
        ]
        if ctx.joint is not None and any(dy is not None for dy in grads):
            dy = beside(grads, ctx.joint.sizes)
            target = main_gradient(ctx.weights) if all(wanted) else None
            dx, (whole,) = _gradients(ctx, [dy], [ctx.joint.whole], [any(wanted)], [target])
            pieces = [None] * count if whole is None else whole.split(ctx.joint.sizes)
            dweights = [piece if want else None for piece, want in zip(pieces, wanted, strict=True)]
        else:
            targets = [
                main_gradient([w]) if want else None for w, want in zip(ctx.weights, wanted, strict=True)
            ]
            dx, dweights = _gradients(ctx, grads, ctx.prepared, wanted, targets)
        dbiases: list[torch.Tensor | None] = [None] * count
        for i, dy in enumerate(grads):
            if dy is not None and ctx.needs_input_grad[7 + count + i]:
                dbiases[i] = dy.float().sum(0)
        return dx, None, None, None, None, None, None, *dweights, *dbiases


def _gradients(
    ctx, grads, prepared, wanted, targets
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """dx, and dW fp32 of the linears of which it is ``wanted``; None where it was added to a target."""
    codes: list[tuple[Quantised | None, Quantised | None]] = [(None, None)] * len(grads)
    if ctx.needs_input_grad[0] and ctx.formats.dgrad == "fp8":
        codes = [
            (None, None) if dy is None else _quantise(dy, ctx.formats, want and ctx.formats.wgrad == "fp8")
            for dy, want in zip(grads, wanted, strict=True)
        ]
    rows, columns = zip(*codes, strict=True)
    dx = _dgrad(grads, rows, prepared, ctx.formats, ctx.dtype) if ctx.needs_input_grad[0] else None
    dweights: list[torch.Tensor | None] = [None] * len(grads)
    if any(wanted):
        product = weight_gradient(ctx.saved_kind, ctx.saved_tensors, ctx.formats, ctx.remake)
        dweights = [
            product(dy, codes, target) if want else None
            for dy, codes, want, target in zip(grads, columns, wanted, targets, strict=True)
        ]
    return dx, dweights


def beside(grads: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor:
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


def _quantise(x: torch.Tensor, formats: LinearFormats, both: bool) -> tuple[Quantised, Quantised | None]:
    """The 1x128 codes of x and, if ``both``, its 128x1 codes from the same read."""
    scale = (formats.scale_format, formats.scale_floor)
    if both:
        return implementation("quantise_both", x.device.type)(x, *scale)
    return implementation("quantise_activation", x.device.type)(x, *scale), None


def _dgrad(grads, rows, prepared, formats: LinearFormats, dtype: torch.dtype) -> torch.Tensor | None:
    """Sum over the linears of dy W: in fp32 if there are several, one rounding. ``rows``: 1x128 codes of the grads."""
    terms = [(dy, codes, p) for dy, codes, p in zip(grads, rows, prepared, strict=True) if dy is not None]
    out_dtype = dtype if len(terms) == 1 else torch.float32
    total = None
    for dy, codes, p in terms:
        device = dy.device.type
        if formats.dgrad == "fp8":
            term = implementation("dgrad_fp8_matmul", device)(codes, p.dgrad_operand(), out_dtype)
        else:
            term = implementation("dgrad_matmul", device)(
                dy.to(DTYPES[formats.dgrad]), p.dgrad_operand(), out_dtype
            )
        total = term if total is None else total.add_(term)
    return None if total is None else total.to(dtype)


Weight = torch.Tensor | Quantised | PreparedWeight


def _ready(
    weights: Sequence[Weight], prepared, formats: LinearFormats, dtype: torch.dtype
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
    remake: Remake | None = None,
) -> tuple[torch.Tensor, ...]:
    """Several linears of one input x [..., K] (q, k, v or gate, up): bits as by `linear` one by one, x
    handled once.

    ``prepared``: `prepare_weight` of each weight, or `prepare_joint` of all (the results are then column slices of one
    matrix), to save its work; ``quantised``: the 1x128 codes of x [M, K] that a fused producer already made;
    ``remake``: what makes x again, saved in place of its 128x1 codes.
    Raises ValueError listing everything that does not fit.
    """
    joint = prepared if isinstance(prepared, JointWeight) else None
    ready = _ready(weights, prepared, formats, x.dtype)
    parameters = [weight if isinstance(weight, torch.Tensor) else None for weight in weights]
    _check(x.shape, ready, parameters, biases, formats, quantised)
    rows, out_dtype = x.reshape(-1, x.shape[-1]), out_dtype or x.dtype
    if torch.is_grad_enabled():
        outputs = _Linears.apply(
            rows, formats, ready, joint, quantised, out_dtype, remake, *parameters, *biases
        )
    else:  # nothing is kept for a gradient
        outputs = _outputs(_operand(rows, formats, quantised, False)[0], ready, joint, biases, out_dtype)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


def linears_of_codes(
    x: Quantised,
    prepared: Sequence[PreparedWeight] | JointWeight,
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The fp8 forward of `linears` for inference, x [M, K] given as 1x128 codes only: no gradient flows."""
    joint = prepared if isinstance(prepared, JointWeight) else None
    ready = list(joint.parts if joint is not None else prepared)  # type: ignore[arg-type]
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


def _check(shape, ready, parameters, biases, formats: LinearFormats, quantised: Quantised | None) -> None:
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
