"""Weights as the GEMMs of :mod:`precision_kernels.autograd.linear` read them, made once per optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from precision_kernels import reference
from precision_kernels.dispatch import implementation
from precision_kernels.reference.formats import BLOCK, SCALE_FLOOR, SCALE_FORMATS, Quantised, ScaleFormat

_Made = TypeVar("_Made")
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

    @property
    def scale(self) -> ScaleOptions:
        """Arguments of the quantisers."""
        return ScaleOptions(self.scale_format, self.scale_floor)

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


class Codes(NamedTuple):
    """A matrix x [M, K] quantised in both directions, each only if there is a use for it.

    rows: 1x128 codes, what a forward or dgrad GEMM reads. columns: 128x1 codes, what a wgrad GEMM reads.
    """

    rows: Quantised | None = None
    columns: Quantised | None = None


class ScaleOptions(NamedTuple):
    """How scales are made, in the order in which every quantiser takes it."""

    scale_format: ScaleFormat
    scale_floor: float


def dequantise(q: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """codes × scale of each block, in `dtype`, by the operator bound for the device of `q`."""
    return implementation(reference.dequantise, q.codes.device.type)(q, dtype)


@dataclass(eq=False)
class PreparedWeight:
    """A weight [N, K] in the form its GEMMs read. Make it with `prepare_weight`, once per optimiser step.

    Exactly one of ``quantised`` (fp8 forward) and ``values`` (the forward's dtype) is given.
    """

    formats: LinearFormats
    quantised: Quantised | None = None
    values: torch.Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> torch.Size:
        """(out_features N, in_features K)."""
        held = self.quantised if self.quantised is not None else self.values
        return held.shape  # type: ignore[union-attr]

    def _memo(self, key: str, make: Callable[[], _Made]) -> _Made:
        if key not in self.memo:
            self.memo[key] = make()
        made: _Made = self.memo[key]
        return made

    def forward_operand(self) -> torch.Tensor | reference.AlignedWeight:
        """What `invariant_matmul` multiplies by: the packed weight [N, K] in the forward's dtype."""
        values = self.values
        assert values is not None  # a forward that is not fp8 has values
        return self._memo(
            "forward", lambda: implementation(reference.pack_weight, values.device.type)(values)
        )

    def fp8_dgrad_operand(self) -> Quantised:
        """The 128x128 codes [N, K] of an fp8 dgrad: those of an fp8 forward, else made of the values."""
        if self.quantised is not None:
            return self.quantised
        values = self.values
        assert values is not None  # one of the two is there
        quantise = implementation(reference.quantise_weight, values.device.type)
        return self._memo("dgrad", lambda: quantise(values, *self.formats.scale))

    def dgrad_operand(self) -> torch.Tensor:
        """The weight [N, K] in the dtype of a dgrad that is not fp8; after an fp8 forward its dequantised codes."""
        dtype, quantised = DTYPES[self.formats.dgrad], self.quantised
        if quantised is not None:
            return self._memo("dgrad", lambda: dequantise(quantised, dtype))
        assert self.values is not None
        return self.values.to(dtype)


def prepare_weight(
    weight: torch.Tensor | Quantised, formats: LinearFormats, compute_dtype: torch.dtype
) -> PreparedWeight:
    """Round a weight [N, K] to the compute dtype and bring it into the forward's format; no gradient flows through.

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
        quantise = implementation(reference.quantise_weight, weight.device.type)
        return PreparedWeight(formats, quantised=quantise(rounded, *formats.scale))
    return PreparedWeight(formats, values=rounded.to(DTYPES[formats.forward]))


@dataclass(eq=False)
class JointWeight:
    """Weights of several linears of one input, one below the other: one GEMM for all. Make it with `prepare_joint`.

    whole: [N1 + N2 + ..., K]. parts: the single weights [Ni, K], rows of ``whole`` in memory.
    """

    whole: PreparedWeight
    parts: tuple[PreparedWeight, ...]

    @property
    def sizes(self) -> list[int]:
        """Outputs Ni of each linear."""
        return [part.shape[0] for part in self.parts]


def joinable(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether linears with weights of these shapes [N, K] can be one GEMM with the bits of each alone.

    Every N must be a multiple of 128: then no 128x128 block spans two weights, and each alone takes the kernel that
    all together take.
    """
    return (
        len(shapes) > 1 and len({k for _, k in shapes}) == 1 and all(n and n % BLOCK == 0 for n, _ in shapes)
    )


def rows_of_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrix whose consecutive rows ``tensors`` [Ni, C] are in memory, as a view; None if they lie apart."""
    first, offset = tensors[0], tensors[0].storage_offset()
    for t in tensors:
        if (
            t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or t.storage_offset() != offset
            or t.shape[1] != first.shape[1]
            or not t.is_contiguous()
        ):
            return None
        offset += t.numel()
    rows = sum(t.shape[0] for t in tensors)
    return torch.as_strided(first, (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = rows_of_one(tensors)
    return torch.cat(list(tensors)) if whole is None else whole


def prepare_joint(
    weights: Sequence[torch.Tensor | Quantised], formats: LinearFormats, compute_dtype: torch.dtype
) -> JointWeight:
    """`prepare_weight` of several weights [Ni, K] of one input, which must be `joinable`; ValueError if they are not.

    Quantised weights that lie below each other in memory already (`rows_of_one`) are not copied.
    """
    shapes = [tuple(w.shape) for w in weights]
    if not joinable(shapes):
        raise ValueError(
            f"prepare_joint: weights of {shapes} cannot be one GEMM; two or more are needed, with one K and every N a "
            "multiple of 128. Use prepare_weight for each"
        )
    quantised = [w for w in weights if isinstance(w, Quantised)]
    if quantised and len(quantised) != len(weights):
        raise ValueError("prepare_joint: either all weights are quantised or none is")
    source: torch.Tensor | Quantised
    if quantised:
        first = quantised[0]
        source = Quantised(
            _stacked([q.codes for q in quantised]),
            _stacked([q.scales for q in quantised]),
            first.kind,
            first.scale_format,
        )
    else:
        source = _stacked([w.detach().to(compute_dtype) for w in weights if isinstance(w, torch.Tensor)])
    whole = prepare_weight(source, formats, compute_dtype)
    parts, row = [], 0
    for n, _ in shapes:
        parts.append(_rows(whole, row, row + n))
        row += n
    return JointWeight(whole, tuple(parts))


def _rows(whole: PreparedWeight, start: int, stop: int) -> PreparedWeight:
    if whole.quantised is None:
        assert whole.values is not None  # one of the two is there
        return PreparedWeight(whole.formats, values=whole.values[start:stop])
    q = whole.quantised
    scales = q.scales[start // BLOCK : stop // BLOCK]
    return PreparedWeight(
        whole.formats, quantised=Quantised(q.codes[start:stop], scales, q.kind, q.scale_format)
    )
