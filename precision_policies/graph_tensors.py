"""Labels of the tensors that flow between operators: dtype, granularity of scales, scale format, layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .schema import FORMAT_OF_DTYPE, FORMAT_OF_MASTER

if TYPE_CHECKING:
    from .policy import PrecisionPolicy

ROWS = "rows"  # contiguous along the features: [tokens, features] or [out, in]
COLUMNS = "columns"  # scaled along the tokens, as the weight-gradient GEMM contracts over them


@dataclass(frozen=True)
class Label:
    """dtype: e4m3 | bf16 | fp16 | fp32. granularity: block of one scale, or "" without scales."""

    dtype: str
    granularity: str = ""
    scale_format: str = ""
    layout: str = ROWS

    def __str__(self) -> str:
        block = f" {self.granularity.replace('x', '×')}" if self.granularity else ""
        return f"{self.dtype}{block}" + (f" {self.scale_format}" if self.scale_format == "ue8m0" else "")

    def attributes(self) -> dict[str, Any]:
        """As attributes of an edge."""
        return asdict(self)


@dataclass(frozen=True)
class Labels:
    """The labels that a policy gives to tensors."""

    policy: PrecisionPolicy

    @property
    def compute(self) -> Label:
        """Activations between operators."""
        return Label(FORMAT_OF_DTYPE[self.policy.compute_dtype])

    @property
    def gradient(self) -> Label:
        """Gradients between operators."""
        return Label(FORMAT_OF_DTYPE[self.policy.gradient_dtype])

    @property
    def master(self) -> Label:
        """Master weights."""
        return Label(FORMAT_OF_MASTER[self.policy.master_dtype])

    def plain(self, format: str) -> Label:
        """A tensor in a format other than fp8."""
        return Label(format)

    def activation(self, format: str) -> Label:
        """An operand with one row per token."""
        q = self.policy.quantisation
        return self._fp8(q.activation_block) if format == "fp8" else Label(format)

    def column(self, format: str) -> Label:
        """An operand of the weight-gradient GEMM."""
        q = self.policy.quantisation
        return self._fp8(q.column_block, COLUMNS) if format == "fp8" else Label(format)

    def weight(self, format: str) -> Label:
        """A weight as its GEMM reads it."""
        return self._fp8(self.policy.quantisation.weight_block) if format == "fp8" else Label(format)

    def _fp8(self, block: str, layout: str = ROWS) -> Label:
        q = self.policy.quantisation
        return Label(q.code_format, block, q.scale_format, layout)
