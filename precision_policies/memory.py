"""Bytes that a learner holds for each parameter, by the formats that a policy names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .schema import BLOCK

if TYPE_CHECKING:
    from .policy import PrecisionPolicy

__all__ = ["MASTER_BYTES", "MOMENT_BYTES", "StateBytes", "state_bytes"]

MASTER_BYTES: dict[str, float] = {"float32": 4.0, "split_float32": 2.0 + 2.0 + 1 / 8, "bfloat16": 2.0}
"""Of the weight that the optimizer updates; split_float32 has one bit more for ties of its rounding."""
MOMENT_BYTES: dict[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "bfloat16_stochastic": 2.0,
    "blockwise_8bit": 1.0 + 4.0 / BLOCK,
}
"""Of each of the two moments."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
GRADIENT_BYTES = 4.0
"""Gradients are summed in float32 under every policy."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes for one parameter of a projection, between backward pass and optimizer step, when all of it is there.

    operands: what the GEMMs read that is not the master itself: e4m3 codes as they lie and transposed, with their
        scales, or a copy in compute_dtype. arriving: gradients in the master's dtype before they are added to the sum.
    """

    master: float
    moments: float
    gradient: float
    arriving: float
    operands: float

    @property
    def total(self) -> float:
        """All of it; activations and the engine come on top."""
        return self.master + self.moments + self.gradient + self.arriving + self.operands


def state_bytes(policy: PrecisionPolicy) -> StateBytes:
    """What the learner of a policy holds for one parameter of a projection whose sides are multiples of 128."""
    held = "bfloat16" if policy.master_dtype == "split_float32" else policy.master_dtype
    copy = 0.0 if held == policy.compute_dtype else _BYTES[policy.compute_dtype]
    codes = 2.0 + 4.0 / BLOCK**2
    return StateBytes(
        MASTER_BYTES[policy.master_dtype],
        2 * MOMENT_BYTES[policy.optimizer_state_dtype],
        GRADIENT_BYTES,
        2.0 if policy.master_dtype == "bfloat16" else 0.0,
        codes if policy.linear.train_forward == "fp8" else copy,
    )
