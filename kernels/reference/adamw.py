"""AdamW (arXiv 1711.05101): THE definition of one update, for every format that weights and moments are stored in.

All in fp32, each operation rounded once, nothing contracted:

    g' = g · gradient_scale
    m' = m + (g' - m) · (1 - beta1)
    v' = v · beta2 + (g' · g') · (1 - beta2)
    w' = w · (1 - lr · decay) + (m' / (sqrt(v') / sqrt(1 - beta2^t) + eps)) · (-lr / (1 - beta1^t))

Constants are computed in double precision and rounded to fp32 once (1 / sqrt(1 - beta2^t) is one of them). w, m and v
are widened from what is stored, w' is rounded to it to nearest, m' and v' as `reference.moments` says.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch

from precision_kernels.declaration import define
from precision_kernels.reference.master import LowHalf, join_float32, split_float32
from precision_kernels.reference.moments import (
    Moment,
    load_moment,
    random_keys,
    random_words,
    square_root,
    store_moment,
)

__all__ = ["AdamWStep", "adamw", "check_adamw"]


def _fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


class AdamWStep(NamedTuple):
    """The constants of one update of one tensor, as fp32 numbers, and the keys of its random bits."""

    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_correction: float
    eps: float
    step_size: float
    gradient_scale: float
    keys: tuple[int, int]

    @classmethod
    def of(
        cls,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        position: int = 0,
        gradient_scale: float = 1.0,
    ) -> AdamWStep:
        """Those of update number ``step`` (from 1) of the tensor number ``position``.

        gradient_scale: what gradients are multiplied by first: for clipping, without a pass over them.
        """
        beta1, beta2 = betas
        constants = (
            1.0 - lr * weight_decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            1.0 / math.sqrt(1.0 - beta2**step),
            eps,
            -lr / (1.0 - beta1**step),
            gradient_scale,
        )
        return cls._make((*map(_fp32, constants), random_keys(step, position)))


def check_adamw(
    weight: torch.Tensor, low_half: LowHalf | None, gradient: torch.Tensor, mean: Moment, square: Moment
) -> None:
    """Raises ValueError naming everything that does not fit together; see `adamw`."""
    problems = [
        f"{name} has shape {tuple(t.shape)}, the weight {tuple(weight.shape)}"
        for name, t in (("gradient", gradient), ("mean", mean.values), ("square", square.values))
        if t.shape != weight.shape
    ]
    if low_half is not None and weight.dtype != torch.bfloat16:
        problems.append(f"a weight with a low half must be bfloat16, got {weight.dtype}")
    if low_half is not None and low_half.low.shape != weight.shape:
        problems.append(
            f"the low half has shape {tuple(low_half.low.shape)}, the weight {tuple(weight.shape)}"
        )
    if mean.format != square.format or mean.square or not square.square:
        problems.append(
            f"moments must be a first and a second one of one format, got {mean.format}, {square.format}"
        )
    written = [weight, mean.values, square.values, *(low_half or ())]
    if not all(t.is_contiguous() for t in written):
        problems.append("weight, low half and moments must be contiguous")
    if problems:
        raise ValueError("adamw: " + "; ".join(problems))


@define
def adamw(
    weight: torch.Tensor,
    low_half: LowHalf | None,
    gradient: torch.Tensor,
    mean: Moment,
    square: Moment,
    step: AdamWStep,
) -> None:
    """One update of a weight and its moments, in place.

    Args:
        weight: float32, bfloat16 or float16, any shape, contiguous.
        low_half: of a bfloat16 weight that is the high half of fp32 numbers (`reference.master`).
        gradient: of the weight's shape, any floating dtype; must be finite.
        mean, square: first and second moment, of one format.

    Raises:
        ValueError: listing what does not fit together.
    """
    check_adamw(weight, low_half, gradient, mean, square)
    # 0-d tensors on the device: CUDA computes with a Python number in other ways than with a tensor.
    decay, rate1, beta2, rate2, correction, eps, size, scale = (
        torch.tensor(c, dtype=torch.float32, device=weight.device) for c in step[:-1]
    )
    w = weight.float() if low_half is None else join_float32(weight, low_half)
    g = gradient.float() * scale
    m, v = load_moment(mean), load_moment(square)
    m = m + (g - m) * rate1
    v = v * beta2 + (g * g) * rate2
    w = w * decay + (m / (square_root(v) * correction + eps)) * size
    words = random_words(weight.numel(), step.keys, weight.device).view(weight.shape)
    store_moment(mean, m, words)
    store_moment(square, v, words)
    if low_half is None:
        weight.copy_(w)
    else:
        high, rest = split_float32(w)
        weight.copy_(high)
        low_half.low.copy_(rest.low)
        low_half.ties.copy_(rest.ties)
