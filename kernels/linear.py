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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import SCALE_FLOOR, SCALE_FORMATS, Quantised, ScaleFormat

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LinearFormats:
    """Formats of one linear: each of forward, dgrad, wgrad, saved is "fp8", "bf16", "fp16" or "fp32"."""

    forward: str = "bf16"
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    saved: str = "bf16"
    scale_format: ScaleFormat = "fp32"
    scale_floor: float = SCALE_FLOOR

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be 'fp8', 'bf16', 'fp16' or 'fp32', got {getattr(self, name)!r}"
            for name in ("forward", "dgrad", "wgrad", "saved")
            if getattr(self, name) != "fp8" and getattr(self, name) not in DTYPES
        ]
        if self.scale_format not in SCALE_FORMATS:
            problems.append(f"scale_format must be one of {SCALE_FORMATS}, got {self.scale_format!r}")
        if problems:
            raise ValueError("LinearFormats: " + "; ".join(problems))


def _dequantise(q: Quantised, dtype: torch.dtype) -> torch.Tensor:
    return implementation("dequantise", q.codes.device.type)(q, dtype)


@dataclass(eq=False)
class PreparedWeight:
    """A weight [N, K] in the form its GEMMs read. Make it with `prepare_weight`, once per optimiser step.

    Exactly one of ``quantised`` (fp8 forward) and ``values`` (the forward's dtype) is given.
    """

    formats: LinearFormats
    quantised: Quantised | None = None
    values: torch.Tensor | None = None
    memo: dict = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> torch.Size:
        """(out_features N, in_features K)."""
        held = self.quantised if self.quantised is not None else self.values
        return held.shape  # type: ignore[union-attr]

    def _memo(self, key: str, make):
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def forward_operand(self):
        """What `invariant_matmul` multiplies by."""
        assert self.values is not None  # a forward that is not fp8 has values
        return self._memo(
            "forward", lambda: implementation("pack_weight", self.values.device.type)(self.values)
        )

    def dgrad_operand(self):
        """`Quantised` for an fp8 dgrad, else a tensor [N, K] in the dgrad's dtype."""
        f = self.formats
        if f.dgrad == "fp8":
            if self.quantised is not None:
                return self.quantised
            assert self.values is not None  # one of the two is there
            quantise = implementation("quantise_weight", self.values.device.type)
            return self._memo("dgrad", lambda: quantise(self.values, f.scale_format, f.scale_floor))
        if self.quantised is not None:
            return self._memo("dgrad", lambda: _dequantise(self.quantised, DTYPES[f.dgrad]))
        assert self.values is not None
        return self.values.to(DTYPES[f.dgrad])


def prepare_weight(
    weight: torch.Tensor | Quantised, formats: LinearFormats, compute_dtype: torch.dtype
) -> PreparedWeight:
    """Round a weight [N, K] to the compute dtype and bring it into the forward's format; no gradient flows
    through.

    A `Quantised` weight (128x128; a rollout engine's) is taken as it is and needs formats.forward == "fp8".
    """
    if isinstance(weight, Quantised):
        if formats.forward != "fp8" or weight.kind != "128x128":
            raise ValueError(
                f"prepare_weight: a weight quantised in {weight.kind} blocks cannot serve a forward in "
                f"{formats.forward!r}; 128x128 blocks and 'fp8' are needed"
            )
        return PreparedWeight(formats, quantised=weight)
    rounded = weight.detach().to(compute_dtype)
    if formats.forward == "fp8":
        quantise = implementation("quantise_weight", weight.device.type)
        return PreparedWeight(formats, quantised=quantise(rounded, formats.scale_format, formats.scale_floor))
    return PreparedWeight(formats, values=rounded.to(DTYPES[formats.forward]))


class _Linears(torch.autograd.Function):
    """Several linears of one input: quantised and saved once. See the module docstring for the mathematics."""

    @staticmethod
    def forward(ctx, x, formats, prepared, quantised, out_dtype, *parameters):
        weights, biases = parameters[: len(prepared)], parameters[len(prepared) :]
        device = x.device.type
        trained = any(w is not None and w.requires_grad for w in weights)
        columns = None
        if formats.forward == "fp8":
            if quantised is None:
                both = trained and formats.saved == formats.wgrad == "fp8"
                quantised, columns = _quantise(x, formats, both)
            matmul = implementation("block_fp8_matmul", device)
            outputs = [matmul(quantised, p.quantised, out_dtype) for p in prepared]
        else:
            matmul = implementation("invariant_matmul", device)
            operand = x.to(DTYPES[formats.forward])
            outputs = [matmul(operand, p.forward_operand(), out_dtype) for p in prepared]
        outputs = [y if b is None else y + b.to(y.dtype) for y, b in zip(outputs, biases, strict=True)]
        ctx.set_materialize_grads(False)
        ctx.formats, ctx.prepared, ctx.dtype = formats, prepared, x.dtype
        ctx.saved_kind = ""
        if trained:
            ctx.saved_kind, tensors = _saved(x, formats, quantised, columns)
            ctx.save_for_backward(*tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        count = len(ctx.prepared)
        codes: list[tuple[Quantised | None, Quantised | None]] = [(None, None)] * count
        if ctx.needs_input_grad[0] and ctx.formats.dgrad == "fp8":
            wgrads = [ctx.formats.wgrad == "fp8" and needed for needed in ctx.needs_input_grad[5 : 5 + count]]
            codes = [
                (None, None) if dy is None else _quantise(dy, ctx.formats, wgrad)
                for dy, wgrad in zip(grads, wgrads, strict=True)
            ]
        rows, columns = zip(*codes, strict=True)
        dx = _dgrad(grads, rows, ctx.prepared, ctx.formats, ctx.dtype) if ctx.needs_input_grad[0] else None
        dweights: list[torch.Tensor | None] = [None] * count
        dbiases: list[torch.Tensor | None] = [None] * count
        if ctx.saved_kind:
            product = _wgrad(ctx.saved_kind, ctx.saved_tensors, ctx.formats)
        for i, dy in enumerate(grads):
            if dy is not None and ctx.needs_input_grad[5 + i]:
                dweights[i] = product(dy, columns[i])
            if dy is not None and ctx.needs_input_grad[5 + count + i]:
                dbiases[i] = dy.float().sum(0)
        return dx, None, None, None, None, *dweights, *dbiases


def _quantise(x: torch.Tensor, formats: LinearFormats, both: bool) -> tuple[Quantised, Quantised | None]:
    """The 1x128 codes of x and, if ``both``, its 128x1 codes from the same read."""
    scale = (formats.scale_format, formats.scale_floor)
    if both:
        return implementation("quantise_both", x.device.type)(x, *scale)
    return implementation("quantise_activation", x.device.type)(x, *scale), None


def _saved(
    x: torch.Tensor, formats: LinearFormats, quantised: Quantised | None, columns: Quantised | None
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """What the wgrad will need of x, in the format of the policy: (kind, tensors)."""
    if formats.saved != "fp8":
        return "values", (x.to(DTYPES[formats.saved]),)
    scale = (formats.scale_format, formats.scale_floor)
    if formats.wgrad == "fp8":
        codes = columns or implementation("quantise_columns", x.device.type)(x, *scale)
    else:
        codes = quantised or implementation("quantise_activation", x.device.type)(x, *scale)
    return codes.kind, (codes.codes, codes.scales)


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


def _wgrad(kind: str, tensors: tuple[torch.Tensor, ...], formats: LinearFormats):
    """The function (dy, its 128x1 codes if at hand) -> dW fp32 [N, K] for the saved input."""
    device = tensors[0].device.type
    scale = (formats.scale_format, formats.scale_floor)
    if formats.wgrad == "fp8":
        quantise = implementation("quantise_columns", device)
        x = (
            Quantised(tensors[0], tensors[1], "128x1", formats.scale_format)
            if kind == "128x1"
            else quantise(tensors[0], *scale)
        )
        return lambda dy, codes: implementation("wgrad_fp8_matmul", device)(codes or quantise(dy, *scale), x)
    dtype = DTYPES[formats.wgrad]
    saved = (
        tensors[0]
        if kind == "values"
        else _dequantise(Quantised(tensors[0], tensors[1], "1x128", formats.scale_format), dtype)
    )
    return lambda dy, codes: implementation("wgrad_matmul", device)(dy.to(dtype), saved.to(dtype))


Weight = torch.Tensor | Quantised | PreparedWeight


def linears(
    x: torch.Tensor,
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    formats: LinearFormats,
    prepared: Sequence[PreparedWeight | None] | None = None,
    quantised: Quantised | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Several linears of one input x [..., K] (q, k, v or gate, up): bits as by `linear` one by one, x
    handled once.

    ``prepared[i]``: `prepare_weight` of weights[i], to save its work; ``quantised``: the 1x128 codes of x
    [M, K] that a fused producer already made. Raises ValueError listing everything that does not fit.
    """
    prepared = list(prepared) if prepared is not None else [None] * len(weights)
    ready, parameters = [], []
    for weight, given in zip(weights, prepared, strict=True):
        parameters.append(weight if isinstance(weight, torch.Tensor) else None)
        if isinstance(weight, PreparedWeight):
            ready.append(weight)
        else:
            ready.append(given if given is not None else prepare_weight(weight, formats, x.dtype))
    _check(x, ready, parameters, biases, formats, quantised)
    outputs = _Linears.apply(
        x.reshape(-1, x.shape[-1]), formats, ready, quantised, out_dtype or x.dtype, *parameters, *biases
    )
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


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


def _check(x, ready, parameters, biases, formats: LinearFormats, quantised: Quantised | None) -> None:
    problems = []
    if len(biases) != len(ready):
        problems.append(f"{len(ready)} weights but {len(biases)} biases (give None for a linear without)")
    for i, (p, parameter) in enumerate(zip(ready, parameters, strict=True)):
        if p.formats != formats:
            problems.append(f"weight {i} was prepared for {p.formats}, not for {formats}")
        if p.shape[1] != x.shape[-1]:
            problems.append(f"weight {i} is {tuple(p.shape)} but x has {x.shape[-1]} features")
        if parameter is not None and parameter.shape != p.shape:
            problems.append(
                f"weight {i} has shape {tuple(parameter.shape)} but was prepared as {tuple(p.shape)}"
            )
    rows = x.numel() // max(1, x.shape[-1])
    if quantised is not None and (quantised.kind != "1x128" or tuple(quantised.shape) != (rows, x.shape[-1])):
        problems.append(
            f"quantised must hold x [{rows}, {x.shape[-1]}] in 1x128 blocks, "
            f"got {quantised.kind} {tuple(quantised.shape)}"
        )
    if problems:
        raise ValueError("linear: " + "; ".join(problems))
