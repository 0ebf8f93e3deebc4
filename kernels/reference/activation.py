"""SiLU(gate) * up, forward and backward.

Forward (fp32 with separate roundings; c = compute dtype; exp = `exact.exp`)::

    s = round_c(g / (1 + exp(-g)));   y = round_c(fp32(s) * fp32(up))

Two roundings, as in vLLM's silu_and_mul and Hugging Face's act_fn(gate) * up. g = -inf gives NaN as in torch.

Backward (fp32)::

    a = 1 / (1 + exp(-g));  dgate = dy * up * a * (1 + g * (1 - a));  dup = dy * fp32(s)
"""

from __future__ import annotations

import torch

from precision_kernels.declaration import define
from precision_kernels.reference.exact import exp


def check_gate_up(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raises ValueError unless gate and up have one shape and one of the three dtypes."""
    if (
        gate.shape != up.shape
        or gate.dtype != up.dtype
        or not gate.is_floating_point()
        or gate.dtype == torch.float64
    ):
        raise ValueError(
            "silu_mul: gate and up must have one shape and one of float32, bfloat16, float16, "
            f"got {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}"
        )


@define
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, same shape and dtype as the inputs."""
    check_gate_up(gate, up)
    g = gate.float()
    silu = (g / exp(-g).add_(1.0)).to(gate.dtype)
    return (silu.float() * up.float()).to(gate.dtype)


@define
def silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup) in gate's dtype."""
    g, dy32 = gate.float(), dy.float()
    sigmoid = exp(-g).add_(1.0).reciprocal_()
    dup = dy32 * (g * sigmoid).to(gate.dtype).float()
    dgate = dy32 * up.float() * (sigmoid * (1.0 + g * (1.0 - sigmoid)))
    return dgate.to(gate.dtype), dup.to(gate.dtype)


__all__ = ["silu_mul", "silu_mul_backward"]
