"""FlashAttention-3 forward and its backward with the signatures of `precision_kernels.reference.attention`.

FA3 is ``flash_attn_interface`` (upstream) if installed, else the forward-only copy inside vLLM. ``num_splits=1``: keys
are summed in one order, so a query row depends on its own keys only; measured bit-equal between packed training
batches, prefill and paged decode (docs/on_policy.md).

The backward takes FA3's output and log-sum-exp: `triton.attention` for heads that it serves, PyTorch's FlashAttention-2
kernel for others; gradients agree with fp32 attention to about 3e-3 relative.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from precision_kernels.declaration import implements
from precision_kernels.hopper.attention_width import attention_width, widen_heads
from precision_kernels.reference.attention import shape_problems
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.registration import fake, operator
from precision_kernels.triton import attention as triton_attention
from precision_kernels.triton.launch import VERSION as TRITON_VERSION

_PAGE = 16
"""Tokens per page of the cache, vLLM's default; a page table lets sequences use any rows of one cache."""


def _load() -> tuple[str, Callable]:
    """("package version", flash_attn_varlen_func). ImportError naming both places if neither holds FA3."""
    failures = []
    try:
        upstream = importlib.import_module("flash_attn_interface")
        return f"flash_attn_3-{getattr(upstream, '__version__', 'unknown')}", upstream.flash_attn_varlen_func
    except ImportError as error:
        failures.append(f"flash_attn_interface: {error}")
    try:
        vllm = importlib.import_module("vllm")
        bundled = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
        if bundled.FA3_AVAILABLE:
            return f"vllm_flash_attn_3-{vllm.__version__}", bundled.flash_attn_varlen_func
        failures.append(f"vllm.vllm_flash_attn: {bundled.FA3_UNAVAILABLE_REASON}")
    except ImportError as error:
        failures.append(f"vllm.vllm_flash_attn: {error}")
    raise ImportError(
        f"FlashAttention-3 is needed for attention on CUDA and not there ({'; '.join(failures)})"
    )


_version, _varlen = _load()
_extra = {"fa_version": 3} if _version.startswith("vllm") else {}


@operator("flash_attention")
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed causal attention: (o [T, H, Dv], log-sum-exp fp32 [H, T])."""
    o, lse = _varlen(
        q, k, v, max_seqlen_q=longest, cu_seqlens_q=cu_seqlens, max_seqlen_k=longest, cu_seqlens_k=cu_seqlens,
        softmax_scale=scale, causal=True, num_splits=1, return_softmax_lse=True, **_extra,
    )[:2]  # fmt: skip
    return o, lse


@fake(_forward_op)
def _(q, k, v, cu_seqlens, longest, scale):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@operator("flash_attention_cached")
def cached_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest_q: int, keys: torch.Tensor,
    longest_k: int, pages: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Causal attention of packed q over paged k, v [pages, page, Hkv, D]; ``keys`` int32 [B] are in use."""
    o, lse = _varlen(
        q, k, v, max_seqlen_q=longest_q, cu_seqlens_q=cu_seqlens, max_seqlen_k=longest_k, seqused_k=keys,
        block_table=pages, softmax_scale=scale, causal=True, num_splits=1, return_softmax_lse=True, **_extra,
    )[:2]  # fmt: skip
    return o, lse


@fake(cached_op)
def _(q, k, v, cu_seqlens, longest_q, keys, longest_k, pages, scale):
    return q.new_empty(*q.shape[:2], v.shape[3]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@operator("flash_attention_backward")
def _backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    cu_seqlens: torch.Tensor, longest: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv). The kernel reads grouped K and V as they are and sums their gradients per group."""
    # The kernel adds dq of different key blocks with atomics unless told otherwise; a run must repeat exactly.
    previous, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    # Made on the device: a copy from the host would wait for all kernels before it, and leave the queue empty.
    no_rng = torch.empty(2, dtype=torch.int64, device=q.device).zero_().view(torch.uint64)
    try:
        return torch.ops.aten._flash_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            0.0,
            True,
            no_rng,
            no_rng,
            scale=scale,
        )
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(previous, warn_only=warn)


@fake(_backward_op)
def _(do, q, k, v, o, lse, cu_seqlens, longest, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@dataclass(eq=False)
class PagedCache:
    """Keys and values of one layer, k and v [rows, max_len rounded up to a page, Hkv, D or wider] in the compute dtype
    (`attention_width`)."""

    k: torch.Tensor
    v: torch.Tensor
    max_len: int

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy cache rows ``source`` [n] over ``target`` [n]: forks a prompt's prefix to the n samples of a group."""
        for tensor in (self.k, self.v):
            tensor[target] = tensor[source]

    def append(self, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout) -> None:
        """Write the packed k, v [T, Hkv, D] of ``layout`` behind what its rows hold; ValueError if one is full."""
        facts = _facts(layout)
        if facts["longest_k"] > self.max_len or facts["last_row"] >= self.k.shape[0]:
            raise ValueError(
                f"PagedCache.append: row {facts['last_row']} with {facts['longest_k']} tokens does not fit a cache of "
                f"{self.k.shape[0]} rows x {self.max_len} tokens; allocate it larger"
            )
        rows = layout.rows()[layout.token_sequence()]
        self.k[rows, layout.positions()] = widen_heads(k, self.k.shape[-1])
        self.v[rows, layout.positions()] = widen_heads(v, self.v.shape[-1])

    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as [pages, page, Hkv, D]."""
        return self.k.view(-1, _PAGE, *self.k.shape[2:]), self.v.view(-1, _PAGE, *self.v.shape[2:])


@implements("flash_attention_3", _version)
def allocate_kv_cache(
    rows: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    storage: torch.dtype,
    device: torch.device | str,
) -> PagedCache:
    """An empty cache for `attention` on CUDA; ``storage`` must be the compute dtype (bfloat16 or float16)."""
    if storage not in (torch.bfloat16, torch.float16):
        raise ValueError(f"allocate_kv_cache: FlashAttention-3 reads bfloat16 or float16, got {storage}")
    shape = (rows, -(-max_len // _PAGE) * _PAGE, kv_heads, attention_width(head_dim))
    k, v = (torch.zeros(shape, dtype=storage, device=device) for _ in range(2))
    return PagedCache(k, v, max_len)


def _facts(layout: AttentionLayout) -> dict:
    """What the kernels need of a layout, read from the device once and kept on it."""
    if "flash" not in layout.memo:
        lengths = layout.lengths
        total = layout.starts() + lengths
        numbers = torch.stack((lengths.max(), total.max(), layout.rows().max())).tolist()
        layout.memo["flash"] = {
            "cu_seqlens": layout.cu_seqlens.to(torch.int32),
            "keys": total.to(torch.int32),
            **dict(zip(("longest", "longest_k", "last_row"), numbers, strict=True)),
        }
    return layout.memo["flash"]


def _pages(layout: AttentionLayout, cache: PagedCache) -> torch.Tensor:
    """Page table int32 [B, pages per row]."""
    per_row = cache.k.shape[1] // _PAGE
    key = ("pages", per_row)
    if key not in layout.memo:
        first = layout.rows()[:, None] * per_row
        layout.memo[key] = (first + torch.arange(per_row, device=first.device)).to(torch.int32)
    return layout.memo[key]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, cache: PagedCache | None
) -> None:
    problems = shape_problems(q, k, v)
    if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
        problems.append(
            f"q, k and v must all be bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cache is not None and not isinstance(cache, PagedCache):
        problems.append(f"the cache must come from allocate_kv_cache on CUDA, got {type(cache).__name__}")
    if (
        cache is None
        and layout.cached is not None
        and _facts(layout)["longest"] != _facts(layout)["longest_k"]
    ):
        problems.append("layout.cached says that keys are in a cache, but no cache was given")
    if layout.window and _facts(layout)["longest_k"] > layout.window:
        problems.append(
            f"a sliding window of {layout.window} tokens is not implemented on CUDA and a sequence has "
            f"{_facts(layout)['longest_k']}: keep sequences within the window, or compute on the CPU"
        )
    if problems:
        raise ValueError("attention: " + "; ".join(problems))


@implements("flash_attention_3", _version)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    cache: PagedCache | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.attention.attention``: (o [T, H, Dv], log-sum-exp fp32 [T, H])."""
    _check(q, k, v, layout, cache)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    facts = _facts(layout)
    value_dim, width = v.shape[-1], attention_width(q.shape[-1])
    q = widen_heads(q, width)
    if cache is None:
        k, v = widen_heads(k, width), widen_heads(v, width)
        o, lse = _forward_op(q, k, v, facts["cu_seqlens"], facts["longest"], scale)
    else:
        cache.append(k, v, layout)
        pages = _pages(layout, cache)
        o, lse = cached_op(
            q,
            *cache.paged(),
            facts["cu_seqlens"],
            facts["longest"],
            facts["keys"],
            facts["longest_k"],
            pages,
            scale,
        )
    return o if o.shape[-1] == value_dim else o[..., :value_dim].contiguous(), lse.t()


def torch_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention_backward` by PyTorch's FlashAttention-2 kernel, for heads of any width."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    facts = _facts(layout)
    q, k, v, do = (t.contiguous() for t in (q, k, v, do))
    return _backward_op(do, q, k, v, o, lse.t().contiguous(), facts["cu_seqlens"], facts["longest"], scale)


@implements("triton_or_torch_flash", f"{TRITON_VERSION}+torch-{torch.__version__}")
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
    """``reference.attention.attention_backward``: (dq, dk, dv) in the inputs' dtype; deterministic.

    Which kernel runs is decided by the heads alone (`triton.attention.serves`).
    """
    served = triton_attention.serves(q, v)
    backward = triton_attention.attention_backward if served else torch_attention_backward
    return backward(do, q, k, v, o, lse, layout, scale)


__all__ = [
    "PagedCache",
    "allocate_kv_cache",
    "attention",
    "attention_backward",
    "cached_op",
    "torch_attention_backward",
]
