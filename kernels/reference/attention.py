"""Causal grouped-query attention whose rows depend on nothing but their own query and keys 0..position.

For a query row of head h at position t, keys j = 0..t (g = h // (H / Hkv)), D = head_dim::

    s_j = fp32(q . k_j) * scale         exact dot product of 23-bit-aligned operands (`exact.align`, blocks
    of 128 over D) m   = max s_j;   p_j = exp(s_j - m) (`exact.exp`, fp32);   l = lane_sum(p_j)
    o   = sum_j p_j v_j / l             fp64, one rounding to fp32 and the compute dtype at the end

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

from precision_kernels.reference.exact import GRID_BITS, align, exp, exponent_ceiling, lane_sum, log
from precision_kernels.reference.formats import BLOCK
from precision_kernels.reference.layout import AttentionLayout, WorkUnit

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
    """Keys and values of one layer for ``rows`` sequences of at most ``max_len`` tokens, in the prepared
    form.

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
        """Write the packed k, v [T, Hkv, D] of ``layout`` behind what its rows hold; ValueError if one is
        full.
        """
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
        """fp64 (k, u) [n, Hkv, keys, D] and e [n, Hkv, keys] of ``rows`` [n]; rows 0..n-1 are not gathered."""
        parts = [self.k[:, :, :keys], self.u[:, :, :keys], self.e[:, :, :keys]]
        if torch.equal(rows, torch.arange(len(rows), device=rows.device)):
            parts = [part[: len(rows)] for part in parts]
        else:
            parts = [part[rows] for part in parts]
        return parts[0].double(), parts[1].double(), parts[2]


def allocate_kv_cache(
    rows: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype,
    device: torch.device | str = "cpu",
) -> KVCache:
    """`KVCache.allocate`, as an operator: another implementation of attention has another cache."""
    return KVCache.allocate(rows, max_len, kv_heads, head_dim, storage, device)


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
    if cache is None:
        keys, units_, scales = prepare_keys_values(k, v)
    else:
        cache.append(k, v, layout)
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.empty(q.shape[0], heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    wide_q = align(q)
    for unit in layout.units():
        if cache is None:
            index = unit.key_index
            kb, ub, eb = (
                keys[index].transpose(1, 2),
                units_[index].transpose(1, 2),
                scales[index].transpose(1, 2),
            )
        else:
            kb, ub, eb = cache.read(layout.rows()[unit.sequences], unit.keys)
        n, tq = unit.query_index.shape
        # [n, tq, H, D] -> [n, Hkv, G*tq, D]: the queries that share keys form one matrix
        qb = wide_q[unit.query_index].view(n, tq, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
        o, row_lse = _unit(qb.reshape(n, kv_heads, -1, q.shape[-1]), kb, ub, eb, unit, scale)
        o = o.view(n, kv_heads, heads // kv_heads, tq, -1).permute(0, 3, 1, 2, 4).reshape(n * tq, heads, -1)
        row_lse = row_lse.view(n, heads, tq).transpose(1, 2).reshape(n * tq, heads)
        out[unit.tokens] = o[unit.keep].to(q.dtype)
        lse[unit.tokens] = row_lse[unit.keep]
    return out, lse


def _unit(
    q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, e: torch.Tensor, unit: WorkUnit, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 q [n, Hkv, R, D], k [n, Hkv, S, D], u [n, Hkv, S, Dv], e [n, Hkv, S] -> (o fp32 [n, Hkv, R, Dv],
    lse [n, Hkv, R]).
    """
    s = q[..., :BLOCK] @ k[..., :BLOCK].transpose(-1, -2)
    for start in range(BLOCK, q.shape[-1], BLOCK):
        s += q[..., start : start + BLOCK] @ k[..., start : start + BLOCK].transpose(-1, -2)
    s = s.float().mul_(scale)
    hidden = torch.arange(unit.keys, device=q.device) > unit.positions[..., None]
    n, tq = unit.positions.shape
    s.view(n, -1, tq, unit.keys).masked_fill_(hidden[:, None], -math.inf)
    top = s.amax(-1, keepdim=True)
    p = exp(s.sub_(top))
    total = lane_sum(p)
    weights = p.double().mul_(e.unsqueeze(-2))
    out = _exact_block(weights[..., :BLOCK], u[..., :BLOCK, :])
    for start in range(BLOCK, unit.keys, BLOCK):
        out += _exact_block(weights[..., start : start + BLOCK], u[..., start : start + BLOCK, :])
    out = (out / total.double().unsqueeze(-1)).float()
    return out, top[..., 0] + log(total)


def _exact_block(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """weights >= 0 [..., R, <=128] fp64 rounded to 23 bits of the row's largest (in place), times u: exact
    in fp64.
    """
    bits = weights.amax(-1, keepdim=True).view(torch.int64)
    exponent = (bits + ((1 << 52) - 1)) >> 52
    c = (((exponent + (52 - GRID_BITS)) << 52) | (1 << 51)).view(torch.float64)
    return weights.add_(c).sub_(c) @ u


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, cache: KVCache | None
) -> None:
    problems = []
    if (
        q.dim() != 3
        or k.dim() != 3
        or v.shape[:2] != k.shape[:2]
        or q.shape[-1] != k.shape[-1]
        or q.shape[1] % k.shape[1]
    ):
        problems.append(
            "q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] with H a multiple of Hkv are needed, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
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
    q32, k32, v32, do32 = (t.float() for t in (q, k, v, do))
    delta = (do32 * o.float()).sum(-1)
    dq, dk, dv = torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
    for unit in layout.units():
        n, tq = unit.query_index.shape

        def rows(t: torch.Tensor, n: int = n, tq: int = tq, unit: WorkUnit = unit) -> torch.Tensor:
            """[T, H, *] -> [n, Hkv, G*tq, *]"""
            picked = t[unit.query_index].view(n, tq, kv_heads, heads // kv_heads, -1)
            return picked.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, heads // kv_heads * tq, -1)

        qb, dob = rows(q32), rows(do32)
        kb, vb = k32[unit.key_index].transpose(1, 2), v32[unit.key_index].transpose(1, 2)
        # rows that only pad the unit must not add to dk and dv
        real = torch.zeros(n * tq, dtype=torch.bool, device=q.device)
        real[unit.keep] = True
        visible = (torch.arange(unit.keys, device=q.device) <= unit.positions[..., None]) & real.view(
            n, tq, 1
        )
        p = (qb @ kb.transpose(-1, -2)).mul_(scale).sub_(rows(lse.unsqueeze(-1)))
        p.view(n, -1, tq, unit.keys).masked_fill_(~visible[:, None], -math.inf)
        p.exp_()
        ds = p * ((dob @ vb.transpose(-1, -2)) - rows(delta.unsqueeze(-1))) * scale
        unit_dq = (ds @ kb).view(n, kv_heads, heads // kv_heads, tq, -1).permute(0, 3, 1, 2, 4)
        dq[unit.tokens] = unit_dq.reshape(n * tq, heads, -1)[unit.keep]
        # padding keys repeat a sequence's last token with gradient exactly 0 (they are masked)
        index = unit.key_index.reshape(-1)
        dk.index_add_(0, index, (ds.transpose(-1, -2) @ qb).transpose(1, 2).reshape(len(index), kv_heads, -1))
        dv.index_add_(0, index, (p.transpose(-1, -2) @ dob).transpose(1, 2).reshape(len(index), kv_heads, -1))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
