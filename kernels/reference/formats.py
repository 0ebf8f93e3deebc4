"""Block formats of the library: what a quantised matrix is.

An e4m3 code c stands for the number float(c) * scale(block). Three block shapes are used:

=========  ==============================  ==========================================
kind       scales of a matrix [R, C]       used for
=========  ==============================  ==========================================
1x128      [R, ceil(C/128)]                activations (forward), gradients (dgrad)
128x1      [ceil(R/128), C]                both operands of wgrad, whose sum runs over rows (tokens)
128x128    [ceil(R/128), ceil(C/128)]      weights
=========  ==============================  ==========================================

The recipe is DeepSeek-V3's (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_FLOOR = 2.0**-126
"""Default smallest scale: the smallest normal fp32, so blocks of 1e-20 keep their value and 0/scale is 0."""

Kind = Literal["1x128", "128x1", "128x128"]
ScaleFormat = Literal["fp32", "ue8m0"]
KINDS: tuple[str, ...] = ("1x128", "128x1", "128x128")
SCALE_FORMATS: tuple[str, ...] = ("fp32", "ue8m0")


def blocks(n: int) -> int:
    """Number of 128-blocks that cover ``n`` elements; the last one may be ragged."""
    return -(-n // BLOCK)


def scale_shape(kind: str, rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a [rows, columns] matrix in blocks of ``kind``."""
    if kind == "1x128":
        return rows, blocks(columns)
    if kind == "128x1":
        return blocks(rows), columns
    if kind == "128x128":
        return blocks(rows), blocks(columns)
    raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")


@dataclass(frozen=True, eq=False)
class Quantised:
    """A matrix as e4m3 codes [R, C] and fp32 scales (shape by ``kind``, see the module docstring).

    Raises ValueError naming every field that does not fit. ``operands`` memoises what a GEMM derives from
    the codes (fp64 copies on CPU); it holds no information and is never serialised or compared.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    kind: Kind
    scale_format: ScaleFormat = "fp32"
    operands: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        problems = []
        if self.codes.dtype != FP8 or self.codes.dim() != 2:
            problems.append(
                f"codes must be a float8_e4m3fn matrix, got {self.codes.dtype} {tuple(self.codes.shape)}"
            )
        if self.scale_format not in SCALE_FORMATS:
            problems.append(f"scale_format must be one of {SCALE_FORMATS}, got {self.scale_format!r}")
        if self.kind not in KINDS:
            problems.append(f"kind must be one of {KINDS}, got {self.kind!r}")
        elif self.codes.dim() == 2:
            expected = scale_shape(self.kind, *self.codes.shape)
            if self.scales.dtype != torch.float32 or tuple(self.scales.shape) != expected:
                problems.append(
                    f"scales of a {tuple(self.codes.shape)} matrix in {self.kind} blocks must be float32 {expected}, "
                    f"got {self.scales.dtype} {tuple(self.scales.shape)}"
                )
        if problems:
            raise ValueError("Quantised: " + "; ".join(problems))

    @property
    def shape(self) -> torch.Size:
        """Shape [R, C] of the matrix."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self.codes.device

    def expanded_scales(self) -> torch.Tensor:
        """The scale of every element, fp32 [R, C]."""
        rows, columns = self.codes.shape
        scales = self.scales
        if self.kind in ("128x1", "128x128"):
            scales = scales.repeat_interleave(BLOCK, 0)[:rows]
        if self.kind in ("1x128", "128x128"):
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
        return scales

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code * scale, multiplied in fp32 and rounded once to ``dtype`` (exact products for float64)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.codes.to(wide) * self.expanded_scales().to(wide)).to(dtype)
