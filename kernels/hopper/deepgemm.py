"""DeepGEMM's Hopper GEMMs behind the signatures of :mod:`precision_kernels.reference.matmul`.

DeepGEMM is ``deep_gemm`` if that is installed, else the copy inside vLLM. Scales are fp32 and stay fp32
(``disable_ue8m0_cast=True``; power-of-two scales are fp32 numbers too). Which kernel serves a call is decided by the
weight's shape alone (:func:`accepts`), never by the number of rows, so a row's bits cannot change with the batch:

=================  ==========================================  =========================================
product            DeepGEMM                                    else, the Triton kernel of `triton.matmul`
=================  ==========================================  =========================================
forward, dgrad     contraction % 128 == 0, outputs % 64 == 0   any other shape
wgrad              both outputs % 64 == 0                      any other shape
bf16 (invariant)   contraction and outputs % 64 == 0           other shapes, fp16, fp32
=================  ==========================================  =========================================

bf16 results come from the 1D2D kernel; fp32 and fp16 ones from the 1D1D kernel, which accumulates into fp32 memory.
Nothing here is bit-equal to the reference: Hopper's FP8 tensor cores keep about 14 bits while they sum 128 products
(measured error: tests/kernels/test_gpu_kernels.py). Each kernel is equal to itself for every number of rows.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from precision_kernels.declaration import implements
from precision_kernels.reference.formats import BLOCK, Quantised
from precision_kernels.reference.matmul import check_contraction, check_kinds
from precision_kernels.registration import fake, operator
from precision_kernels.triton import matmul as triton_matmul
from precision_kernels.triton.launch import VERSION as TRITON_VERSION
from precision_kernels.triton.quantise import aligned_scales


def _load() -> ModuleType:
    """The DeepGEMM module. ImportError naming both places if neither holds it."""
    # vLLM's copy is also importable as vllm.third_party.deep_gemm without initialising an engine.
    failures = []
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            module = importlib.import_module(name)
            module.fp8_gemm_nt, module.bf16_gemm_nt  # noqa: B018 (an old DeepGEMM lacks them)
            return module
        except (ImportError, AttributeError, AssertionError) as error:
            failures.append(f"{name}: {error}")
    raise ImportError(f"DeepGEMM is needed for GEMMs on CUDA and not there ({'; '.join(failures)})")


if os.environ.get("DG_JIT_USE_NVRTC") == "1":
    raise ImportError(
        "DG_JIT_USE_NVRTC=1 makes DeepGEMM fail to find cuda/std headers; unset it, nvcc is used then"
    )
deep_gemm = _load()
_VERSION = f"deep_gemm-{deep_gemm.__version__}+{TRITON_VERSION}"
"""Triton runs the shapes that DeepGEMM refuses."""


_TILE, _TOO_FEW_ROWS = 64, 32
"""Rows of the 1D1D kernel's smallest tile. For 1 to 32 rows DeepGEMM may choose tiles of 16 or 32, which the kernel's
own assertions refuse ("Invalid block size"): vLLM 0.26's copy did not compile for 1, 2, 16, 17 and 32 rows of a weight
[128, 384] and did for 33, 64, 96 and 128 (H200, 2026-12-01)."""


def accepts(outputs: int, contraction: int) -> bool:
    """Whether DeepGEMM runs a forward or dgrad GEMM with a weight of this shape (the rule of the module docstring)."""
    return contraction > 0 and contraction % BLOCK == 0 and outputs % 64 == 0


@operator("deepgemm_fp8")
def _fp8_op(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    """bf16 a [M, K] @ b [N, K].T; a's scales [M, K/128] in the TMA layout, b's [N/128, K/128] or its transpose."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    deep_gemm.fp8_gemm_nt((a, a_scales), (b, b_scales), out, disable_ue8m0_cast=True)
    return out


@fake(_fp8_op)
def _(a, a_scales, b, b_scales):
    return torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)


@operator("deepgemm_fp8_accumulate", mutates=("out",))
def _fp8_accumulate_op(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    out: torch.Tensor,
    fixed: str,
) -> None:
    """fp32 out [M, N] += a [M, K] @ b [N, K].T; both scales [rows, K/128] in the TMA layout.

    ``fixed``: the dimensions out of "mnk" that are compiled into the kernel, those of the weight. With DeepGEMM's
    default "nk" a wgrad, whose K is the number of tokens, would compile (4 s) for every new length of a micro-batch.
    """
    deep_gemm.fp8_gemm_nt(
        (a, a_scales),
        (b, b_scales),
        out,
        c=out,
        recipe=(1, 1, BLOCK),
        compiled_dims=fixed,
        disable_ue8m0_cast=True,
    )


@fake(_fp8_accumulate_op)
def _(a, a_scales, b, b_scales, out, fixed):
    return None


@operator("deepgemm_bf16")
def _bf16_op(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 or fp32 x [M, K] @ w [N, K].T for bf16 operands."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=out_dtype, device=x.device)
    deep_gemm.bf16_gemm_nt(x, w, out)
    return out


@fake(_bf16_op)
def _(x, w, out_dtype):
    return torch.empty(x.shape[0], w.shape[0], dtype=out_dtype, device=x.device)


def _row_scales(weight: Quantised, transposed: bool) -> torch.Tensor:
    """A weight's scales with one row per output [N, K/128] (or [K, N/128]), in the TMA layout; kept on the weight."""
    key = f"row_scales_{'t' if transposed else 'n'}"
    if key not in weight.operands:
        scales = weight.scales.t() if transposed else weight.scales
        rows = weight.shape[1] if transposed else weight.shape[0]
        expanded = aligned_scales(rows, scales.shape[1], scales.device)
        expanded.copy_(scales.repeat_interleave(BLOCK, 0)[:rows])
        weight.operands[key] = expanded
    return weight.operands[key]


def _transposed_codes(weight: Quantised) -> torch.Tensor:
    """The weight's codes as [K, N], rows contiguous; `triton.quantise_weight` makes them, others are copied once."""
    if "transposed" not in weight.operands:
        weight.operands["transposed"] = weight.codes.t().contiguous().t()
    return weight.operands["transposed"].t()


def _product(
    a: Quantised, codes: torch.Tensor, weight: Quantised, transposed: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    if out_dtype == torch.bfloat16:
        scales = weight.scales.t() if transposed else weight.scales
        return _fp8_op(a.codes, a.scales, codes, scales)
    rows, a_scales = a.codes, a.scales
    if a.shape[0] <= _TOO_FEW_ROWS:
        rows, a_scales = _padded_rows(a)
    out = torch.zeros(rows.shape[0], codes.shape[0], dtype=torch.float32, device=codes.device)
    _fp8_accumulate_op(rows, a_scales, codes, _row_scales(weight, transposed), out, "nk")
    return out[: a.shape[0]].to(out_dtype)


def _padded_rows(a: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of 1x128 groups with rows of zeros below, `_TILE` in all."""
    rows, columns = a.shape
    codes = torch.zeros(_TILE, columns, dtype=torch.uint8, device=a.codes.device)
    codes[:rows] = a.codes.view(torch.uint8)
    scales = aligned_scales(_TILE, a.scales.shape[1], a.scales.device)
    scales[:rows] = a.scales
    scales[rows:] = 1.0
    return codes.view(a.codes.dtype), scales


@implements("deepgemm", _VERSION)
def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.block_fp8_matmul``: a [M, K] (1x128) @ b [N, K].T (128x128) -> [M, N]."""
    if not accepts(*b.shape):
        return triton_matmul.block_fp8_matmul(a, b, out_dtype)
    check_kinds("block_fp8_matmul", a=(a, "1x128"), b=(b, "128x128"))
    check_contraction("block_fp8_matmul", "a columns", a.shape[1], "b columns", b.shape[1])
    return _product(a, b.codes, b, False, out_dtype)


@implements("deepgemm", _VERSION)
def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.dgrad_fp8_matmul``: dy [M, N] (1x128) @ w [N, K] (128x128) -> [M, K]."""
    if not accepts(w.shape[1], w.shape[0]):
        return triton_matmul.dgrad_fp8_matmul(dy, w, out_dtype)
    check_kinds("dgrad_fp8_matmul", dy=(dy, "1x128"), w=(w, "128x128"))
    check_contraction("dgrad_fp8_matmul", "dy columns", dy.shape[1], "w rows", w.shape[0])
    return _product(dy, _transposed_codes(w), w, True, out_dtype)


def whole_blocks(q: Quantised) -> torch.Tensor:
    """128x1 codes [M, C] as [C, M rounded up to 128] with contiguous rows, as `triton.quantise_columns` stores them."""
    rows, columns = q.shape
    padded = -(-rows // BLOCK) * BLOCK
    storage = q.codes.untyped_storage()
    # A slice of more rows is copied: DeepGEMM took a strided matrix for a contiguous one (2026-11-29, wrong products).
    if q.codes.stride() == (1, padded) and storage.nbytes() >= q.codes.storage_offset() + columns * padded:
        return torch.as_strided(q.codes, (columns, padded), (padded, 1))
    whole = torch.zeros(columns, padded, dtype=torch.uint8, device=q.codes.device)
    whole[:, :rows] = q.codes.view(torch.uint8).t()
    return whole.view(q.codes.dtype)


@implements("deepgemm", _VERSION)
def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_fp8_matmul``: dy [M, N].T @ x [M, K], both 128x1, -> fp32 [N, K], added to ``out``."""
    if dy.shape[1] % 64 or x.shape[1] % 64 or not dy.shape[0]:
        return triton_matmul.wgrad_fp8_matmul(dy, x, out)
    check_kinds("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    check_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    if out is None:
        out = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.codes.device)
    # scales [M/128, C] are stored row by row: seen as [C, M/128] that is the TMA layout already.
    _fp8_accumulate_op(whole_blocks(dy), dy.scales.t(), whole_blocks(x), x.scales.t(), out, "mn")
    return out


@implements("deepgemm", _VERSION)
def pack_weight(w: torch.Tensor) -> torch.Tensor:
    """What `invariant_matmul` keeps of a weight: the weight, with contiguous rows."""
    return w.detach().contiguous()


@implements("deepgemm", _VERSION)
def invariant_matmul(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``reference.matmul.invariant_matmul`` with fp32 accumulation: x [M, K] @ w [N, K].T -> [M, N]."""
    out_dtype = out_dtype or x.dtype
    direct = x.dtype == w.dtype == torch.bfloat16 and out_dtype in (torch.bfloat16, torch.float32)
    if not direct or w.shape[0] % 64 or w.shape[1] % 64:
        return triton_matmul.invariant_matmul(x, w, out_dtype)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"invariant_matmul: x [M, K] and w [N, K] are needed, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    return _bf16_op(x.contiguous(), w, out_dtype)


__all__ = [
    "accepts",
    "block_fp8_matmul",
    "dgrad_fp8_matmul",
    "invariant_matmul",
    "pack_weight",
    "wgrad_fp8_matmul",
    "whole_blocks",
]
