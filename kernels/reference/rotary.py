"""Rotary position embedding in the "neox" (Hugging Face) layout: element i pairs with element i + R/2.

The table holds cos and sin ROUNDED to the compute dtype; the rotation is fp32 with one rounding at the end
(as vLLM's rotary_embedding does), products rounded to fp32, no FMA::

    y1 = round_c(x1 * cos - x2 * sin);   y2 = round_c(x2 * cos + x1 * sin)

Angles are fp32(position) * inv_freq, rounded to fp32, as in Hugging Face. sin and cos are polynomials in fp64 made
of IEEE operations, so a table's bits depend neither on its length nor on a library or device.
"""

from __future__ import annotations

import torch

from precision_kernels.declaration import define

_TWO_OVER_PI = 0.6366197723675814
_HALF_PI_HIGH = 1.57079632673412561417  # first 33 bits of pi/2: n * high is exact for |n| < 2^20
_HALF_PI_LOW = 6.07710050650619224932e-11
_SIN = (
    *(1.58969099521155010221e-10, -2.50507602534068634195e-8, 2.75573137070700676789e-6),
    *(-1.98412698298579493134e-4, 8.33333333332248946124e-3, -1.66666666666666324348e-1),
)
_COS = (
    *(-1.13596475577881948265e-11, 2.08757232129817482790e-9, -2.75573143513906633035e-7),
    *(2.48015872894767294178e-5, -1.38888888888741095749e-3, 4.16666666666666019037e-2),
)


def _polynomial(z: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    result = torch.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result.mul_(z).add_(coefficient)
    return result


def sin_cos(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sin, cos) in fp64 of fp32 angles, |angle| < 2^20; error below 1e-15. Coefficients: fdlibm's (Sun, 1993)."""
    x = angle.double()
    n = (x * _TWO_OVER_PI).round_()
    r = x - n * _HALF_PI_HIGH - n * _HALF_PI_LOW
    z = r * r
    s = r + r * z * _polynomial(z, _SIN)
    c = 1.0 - 0.5 * z + z * z * _polynomial(z, _COS)
    quadrant = n.to(torch.int64) & 3
    swap = (quadrant & 1).bool()
    sin, cos = torch.where(swap, c, s), torch.where(swap, s, c)
    return torch.where(quadrant >= 2, -sin, sin), torch.where((quadrant == 1) | (quadrant == 2), -cos, cos)


@define
def rotary_cos_sin(
    inv_freq: torch.Tensor, max_positions: int, dtype: torch.dtype, scaling: float = 1.0
) -> torch.Tensor:
    """Table [max_positions, R] = (cos | sin), each [max_positions, R/2], from inv_freq fp32 [R/2].

    ``scaling`` (yarn's attention factor) multiplies in fp32 before the rounding to ``dtype``.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)
    sin, cos = sin_cos(positions[:, None] * inv_freq.float()[None, :])
    return (torch.cat((cos, sin), -1).float() * scaling).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype)]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, -1)


def _lookup(positions: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin[positions].float().unsqueeze(-2).chunk(2, -1)
    return cos, sin


def check_rotary(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Raises ValueError unless the table [P, R] has the dtype of q and k, and an even R that a head holds."""
    if (
        cos_sin.shape[-1] > q.shape[-1]
        or cos_sin.shape[-1] % 2
        or cos_sin.dtype != q.dtype
        or k.dtype != q.dtype
    ):
        raise ValueError(
            "rotary: the table [P, R] must be in the dtype of q and k with even R <= head_dim, "
            f"got table {cos_sin.dtype} {tuple(cos_sin.shape)}, q {q.dtype} {tuple(q.shape)}, "
            f"k {k.dtype} {tuple(k.shape)}"
        )


@define
def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    v: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Rotate q [T, H, D] and k [T, Hkv, D] at positions [T] with a table [P, R]; R < D leaves the last D-R
    as they are. With v [T, Hkv, D] a contiguous copy of it is the third result.
    """
    check_rotary(q, k, cos_sin)
    cos, sin = _lookup(positions, cos_sin)
    copied = () if v is None else (v.clone(memory_format=torch.contiguous_format),)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), *copied


@define
def rotary_backward(
    dq: torch.Tensor, dk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients: the rotation by the opposite angle, same arithmetic."""
    cos, sin = _lookup(positions, cos_sin)
    return _rotate(dq, cos, -sin), _rotate(dk, cos, -sin)


@define
def rotary_backward_joint(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """`rotary_backward`, and dv [T, Hkv, D] as it is, side by side: [T, (H + 2 Hkv) D]."""
    return torch.cat((*rotary_backward(dq, dk, positions, cos_sin), dv), 1).flatten(1)


__all__ = ["rotary", "rotary_backward", "rotary_backward_joint", "rotary_cos_sin"]
