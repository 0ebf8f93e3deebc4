"""Causal grouped-query attention whose rows depend on nothing but their own query and keys 0..position.

For a query row of head h at position t, keys j = 0..t (with a window w of the layout: t-w+1..t; g = h // (H / Hkv)),
D = head_dim::

    s_j = fp32(q . k_j) * scale            exact dot product of 23-bit-aligned operands, blocks of 128 over D
    m   = max s_j;  p_j = exp(s_j - m);  l = lane_sum(p_j)                     fp32, `exact.exp`, `exact.lane_sum`
    o   = sum_j p_j v_j / l                fp64, rounded to fp32 and the compute dtype at the end

The sum over j is exact within blocks of 128 absolute positions: v_j is aligned to its own 23-bit grid and
split as v_j = 2^e_j * u_j with |u_j| <= 1; p_j 2^e_j of one block is rounded to 2^-23 of its largest. Blocks
are added in ascending order. Masked keys have p = 0 and therefore change no bit: padding, batch, query
chunking, cache length, threads cannot matter. A key or value with inf or NaN can disturb only
the rows that see it (a value does: they become NaN).

Backward (fp32 matmuls, deterministic): the usual formula from the saved log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from precision_kernels.declaration import define
from precision_kernels.reference.exact import GRID_BITS, align, exp, exponent_ceiling, lane_sum, log
from precision_kernels.reference.formats import BLOCK
from precision_kernels.reference.layout import AttentionLayout

_UNIT_GRID = 1.5 * 2.0 ** (52 - GRID_BITS)


def prepare_keys_values(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v [..., D] -> fp64 (aligned k, u with |u| <= 1 on a 2^-23 grid, 2^e [...]) with v ~ u * 2^e.

    All three results are representable in the input dtype (2^e in fp64), so a cache may store them narrow.
    """
    amax = v.abs().amax(-1).float()
    aligned = align(k)
    wide = v.double()
    broken = ~torch.isfinite(amax)
    if broken.any():
        # Score NaN, value 0: a query that may see this key becomes NaN, a masked one is not touched by 0 * NaN.
        aligned = torch.where(broken.unsqueeze(-1), math.nan, aligned)
        wide = torch.where(broken.unsqueeze(-1), 0.0, wide)
        amax = torch.where(broken, 1.0, amax)
    exponent = exponent_ceiling(amax)
    inverse = ((1023 - exponent) << 52).view(torch.float64)
    unit = (wide * inverse.unsqueeze(-1)).add_(_UNIT_GRID).sub_(_UNIT_GRID)
    return aligned, unit, ((1023 + exponent) << 52).view(torch.float64)


@dataclass(eq=False)
class KVCache:
    """Keys and values of one layer for ``rows`` sequences of at most ``max_len`` tokens, in the prepared form.

    k and u [rows, Hkv, max_len, D] in ``storage`` (the compute dtype loses nothing; float64 is 4x larger and
    saves a conversion per step), e = 2^exponent fp64 [rows, Hkv, max_len]. Contents are private to
    `attention`.
    """

    k: torch.Tensor
    u: torch.Tensor
    e: torch.Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        storage: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """An empty cache. Stale contents never need clearing: `AttentionLayout.cached` says what counts."""
        shape = (rows, kv_heads, max_len, head_dim)
        return cls(
            torch.zeros(shape, dtype=storage, device=device),
            torch.zeros(shape, dtype=storage, device=device),
            torch.ones(shape[:3], dtype=torch.float64, device=device),
        )

    @property
    def max_len(self) -> int:
        """Tokens that a row can hold."""
        return self.k.shape[2]

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy cache rows ``source`` [n] over rows ``target`` [n]: forks a prompt's prefix to the n samples
        of a group.
        """
        for tensor in (self.k, self.u, self.e):
            tensor[target] = tensor[source]

    def append(self, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout) -> None:
        """Write the packed k, v [T, Hkv, D] of ``layout`` behind what its rows hold; ValueError if one is full."""
        positions, sequence = layout.positions(), layout.token_sequence()
        needed = int((layout.starts() + layout.lengths).max())
        if needed > self.max_len or int(layout.rows().max()) >= self.k.shape[0]:
            raise ValueError(
                f"KVCache.append: row {int(layout.rows().max())} with {needed} tokens does not fit a cache of "
                f"{self.k.shape[0]} rows x {self.max_len} tokens; allocate it larger"
            )
        rows = layout.rows()[sequence]
        aligned, unit, scale = prepare_keys_values(k, v)
        self.k[rows, :, positions] = aligned.to(self.k.dtype)
        self.u[rows, :, positions] = unit.to(self.u.dtype)
        self.e[rows, :, positions] = scale

    def read(self, rows: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k, u [n, Hkv, keys, D] as stored, e [n, Hkv, keys] of ``rows`` [n]; consecutive rows are not gathered."""
        parts = [self.k[:, :, :keys], self.u[:, :, :keys], self.e[:, :, :keys]]
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
            parts = [part[first : first + len(rows)] for part in parts]
        else:
            parts = [part[rows] for part in parts]
        return parts[0], parts[1], parts[2]


@define
def allocate_kv_cache(
    rows: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype,
    device: torch.device | str,
) -> KVCache:
    """`KVCache.allocate`, as an operator: another implementation of attention has another cache."""
    return KVCache.allocate(rows, max_len, kv_heads, head_dim, storage, device)


@define
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    cache: KVCache | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> (o [T, H, Dv] like q, log-sum-exp fp32 [T, H]).

    With ``cache``, k and v are first appended to it, and queries see everything their row then holds.
    Without, ``layout.cached`` must be absent or zero. ``scale`` defaults to D^-0.5. Differentiable without
    a cache only.
    """
    _check(q, k, v, layout, cache)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cache is not None:
        cache.append(k, v, layout)
    heads, kv_heads = q.shape[1], k.shape[1]
    q_rows, k_rows, v_rows = (t.reshape(-1, t.shape[-1]) for t in (q, k, v))
    out = torch.empty(q_rows.shape[0], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q_rows.shape[0], dtype=torch.float32, device=q.device)
    for unit in layout.units(heads, kv_heads):
        if cache is None:
            prepared = prepare_keys_values(k_rows[unit.key_rows], v_rows[unit.key_rows])
        else:
            prepared = cache.read(layout.rows()[unit.sequences], unit.keys)
        o, unit_lse = _attend(align(q_rows[unit.query_rows]), *prepared, unit.hidden, scale)
        # Queries that pad the unit write the bits of the query they repeat.
        rows = unit.query_rows.view(-1)
        out[rows] = o.view(len(rows), -1).to(q.dtype)
        lse[rows] = unit_lse.view(-1)
    return out.view(*q.shape[:2], -1), lse.view(q.shape[:2])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    e: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hkv, R, D], k [n, Hkv, S, D], u [n, Hkv, S, Dv], e [n, Hkv, S] -> (o [n, Hkv, R, Dv], lse [n, Hkv, R]).

    q is fp64, k and u hold their fp64 values in any dtype, results are fp32.
    """
    scores = _product(q[..., :BLOCK], k[..., :BLOCK], transpose=True)
    for start in range(BLOCK, q.shape[-1], BLOCK):
        scores += _product(q[..., start : start + BLOCK], k[..., start : start + BLOCK], transpose=True)
    s = scores.float().mul_(scale)
    if hidden is not None:
        s.view(s.shape[0], -1, *hidden.shape[2:]).masked_fill_(hidden, -math.inf)
    top = s.amax(-1, keepdim=True)
    p = exp(s.sub_(top))
    total = lane_sum(p)
    weights = torch.mul(p, e.unsqueeze(-2), out=scores)
    out = exact_block(weights[..., :BLOCK], u[..., :BLOCK, :])
    for start in range(BLOCK, u.shape[-2], BLOCK):
        out += exact_block(weights[..., start : start + BLOCK], u[..., start : start + BLOCK, :])
    return out.div_(total.double().unsqueeze(-1)).float(), log(total).add_(top[..., 0])


def exact_block(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """weights >= 0 [..., R, <=128] fp64 rounded to 23 bits of the row's largest (in place), times u: exact in fp64."""
    bits = weights.amax(-1, keepdim=True).view(torch.int64)
    exponent = (bits + ((1 << 52) - 1)) >> 52
    c = (((exponent + (52 - GRID_BITS)) << 52) | (1 << 51)).view(torch.float64)
    return _product(weights.add_(c).sub_(c), u)


_WIDENED_ELEMENTS = 1 << 15
"""Cached keys or values that are widened to fp64 at a time: 256 KiB, so the copy stays in the cache."""


def _product(a: torch.Tensor, b: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """fp64 a [n, Hkv, R, K] @ b [n, Hkv, K, C] (transpose: b [n, Hkv, C, K]); b in any dtype that holds it."""
    if b.dtype == torch.float64:
        return a @ (b.transpose(-1, -2) if transpose else b)
    columns = b.shape[-2] if transpose else b.shape[-1]
    out = torch.empty(*a.shape[:-1], columns, dtype=torch.float64, device=a.device)
    step = max(1, _WIDENED_ELEMENTS // b[0].numel())
    for start in range(0, b.shape[0], step):
        part = b[start : start + step].double()
        torch.matmul(
            a[start : start + step],
            part.transpose(-1, -2) if transpose else part,
            out=out[start : start + step],
        )
    return out


def shape_problems(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str]:
    """What is wrong with the shapes of packed q, k, v; empty if nothing."""
    fits = (
        q.dim() == k.dim() == 3
        and v.shape[:2] == k.shape[:2]
        and q.shape[-1] == k.shape[-1]
        and q.shape[1] % k.shape[1] == 0
    )
    if fits:
        return []
    return [
        "q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] with H a multiple of Hkv are needed, "
        f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    ]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, cache: KVCache | None
) -> None:
    problems = shape_problems(q, k, v)
    if q.dtype != k.dtype or q.dtype != v.dtype:
        problems.append(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if int(layout.cu_seqlens[-1]) != q.shape[0] or k.shape[0] != q.shape[0]:
        problems.append(
            f"the layout packs {int(layout.cu_seqlens[-1])} tokens, q has {q.shape[0]}, k has {k.shape[0]}"
        )
    if cache is None and layout.cached is not None and bool((layout.cached > 0).any()):
        problems.append("layout.cached says that keys are in a cache, but no cache was given")
    if problems:
        raise ValueError("attention: " + "; ".join(problems))


@define
def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in the inputs' dtypes: P = exp(S - lse), dS = P * (dO V^T - rowsum(dO * O)) * scale.

    fp32 throughout. dk and dv of one token are summed over units in a fixed order (fp32), then rounded once.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads, kv_heads = q.shape[1], k.shape[1]
    q32, k32, v32, do32 = (t.float().reshape(-1, t.shape[-1]) for t in (q, k, v, do))
    delta = (do32 * o.float().view_as(do32)).sum(-1)
    flat_lse = lse.reshape(-1)
    dq, dk, dv = torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
    for unit in layout.units(heads, kv_heads):
        rows, columns = unit.query_rows, unit.key_rows
        qb, dob, kb, vb = q32[rows], do32[rows], k32[columns], v32[columns]
        s = (qb @ kb.transpose(-1, -2)).mul_(scale).sub_(flat_lse[rows].unsqueeze(-1))
        shape = (s.shape[0], heads, -1, unit.keys)
        for mask in (unit.hidden, unit.padding):
            if mask is not None:
                s.view(shape).masked_fill_(mask, -math.inf)
        p = s.exp_()
        ds = (dob @ vb.transpose(-1, -2)).sub_(delta[rows].unsqueeze(-1)).mul_(p).mul_(scale)
        # Padding adds zeros: its p is 0, in rows (queries) by `padding` and in columns (keys) by `hidden`.
        dq.index_add_(0, rows.view(-1), (ds @ kb).view(rows.numel(), -1))
        dk.index_add_(0, columns.view(-1), (ds.transpose(-1, -2) @ qb).view(columns.numel(), -1))
        dv.index_add_(0, columns.view(-1), (p.transpose(-1, -2) @ dob).view(columns.numel(), -1))
    return dq.view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


__all__ = ["KVCache", "allocate_kv_cache", "attention", "attention_backward"]
