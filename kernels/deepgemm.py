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
(measured error in tests/kernels/test_gpu_gemm.py). Each kernel is equal to itself for every number of rows.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from precision_kernels.dispatch import Implementation
from precision_kernels.reference.formats import BLOCK, Quantised
from precision_kernels.reference.matmul import _expect, _same_contraction
from precision_kernels.registration import fake, operator
from precision_kernels.triton import matmul as triton_matmul
from precision_kernels.triton import version as triton_version
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
    raise ImportError(
        f"DeepGEMM is needed for FP8 GEMMs on CUDA ({'; '.join(failures)}). Install deep_gemm or vllm, with nvcc on "
        "the PATH; or bind the slower Triton GEMMs with precision_kernels.triton.bind_matmuls()"
    )


if os.environ.get("DG_JIT_USE_NVRTC") == "1":
    raise ImportError(
        "DG_JIT_USE_NVRTC=1 makes DeepGEMM fail to find cuda/std headers; unset it, nvcc is used then"
    )
deep_gemm = _load()


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


@operator("deepgemm_grouped")
def _grouped_op(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """bf16 [M, N]: row i of a [M, K] times b[expert[i]].T, b [G, N, K]."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_scales), (b, b_scales), out, expert, disable_ue8m0_cast=True
    )
    return out


@fake(_grouped_op)
def _(a, a_scales, b, b_scales, expert):
    return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)


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
    out = torch.zeros(a.shape[0], codes.shape[0], dtype=torch.float32, device=codes.device)
    _fp8_accumulate_op(a.codes, a.scales, codes, _row_scales(weight, transposed), out, "nk")
    return out.to(out_dtype)


def block_fp8_matmul(a: Quantised, b: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.block_fp8_matmul``: a [M, K] (1x128) @ b [N, K].T (128x128) -> [M, N]."""
    if not accepts(*b.shape):
        return triton_matmul.block_fp8_matmul(a, b, out_dtype)
    _expect("block_fp8_matmul", a=(a, "1x128"), b=(b, "128x128"))
    _same_contraction("block_fp8_matmul", "a columns", a.shape[1], "b columns", b.shape[1])
    return _product(a, b.codes, b, False, out_dtype)


def _check_grouped(
    name: str, a: Quantised, codes: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor, inner: int
) -> None:
    """ValueError listing what does not fit: codes [G, N, K] whose axis ``inner`` is contracted with a's columns."""
    _expect(name, a=(a, "1x128"))
    groups, n, k = codes.shape
    problems = []
    if n % BLOCK or k % BLOCK or not k or a.shape[1] != codes.shape[inner]:
        problems.append(
            f"N and K must be multiples of 128 and axis {inner} of the codes as long as a's rows, "
            f"got a {tuple(a.shape)}, codes {tuple(codes.shape)}"
        )
    if scales.shape != (groups, n // BLOCK, k // BLOCK):
        problems.append(f"scales must be [{groups}, {n // BLOCK}, {k // BLOCK}], got {tuple(scales.shape)}")
    if expert.dtype != torch.int32 or expert.shape != (a.shape[0],) or a.shape[0] % BLOCK:
        problems.append(
            f"expert must be int32 [{a.shape[0]}] and the number of rows a multiple of 128, "
            f"got {expert.dtype} {tuple(expert.shape)}"
        )
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def grouped_fp8_matmul(
    a: Quantised, codes: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """One GEMM for all experts of a mixture: row i of a [M, K] (1x128) times the weight of expert[i] -> bf16 [M, N].

    codes e4m3 [G, N, K] and scales fp32 [G, N/128, K/128] are the experts' 128x128 weights, stacked; expert int32 [M].
    The rows of an expert are contiguous and start at a multiple of 128; rows between have expert -1 and an undefined
    output. By definition `block_fp8_matmul` expert by expert, bit for bit.
    """
    _check_grouped("grouped_fp8_matmul", a, codes, scales, expert, 2)
    return _grouped_op(a.codes, a.scales, codes, scales, expert)


def grouped_dgrad_fp8_matmul(
    dy: Quantised, codes: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """The input gradient of `grouped_fp8_matmul`: dy [M, N] (1x128) and the same weights and experts -> bf16 [M, K].

    Best given ``codes`` whose axis 1 is contiguous (others are copied). By definition `dgrad_fp8_matmul` expert by
    expert, bit for bit.
    """
    _check_grouped("grouped_dgrad_fp8_matmul", dy, codes, scales, expert, 1)
    transposed = codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)
    return _grouped_op(dy.codes, dy.scales, transposed, scales.transpose(1, 2).contiguous(), expert)


def grouped_wgrad_fp8_matmul(
    dy: Quantised, x: Quantised, starts: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight gradients of `grouped_fp8_matmul`: fp32 [G, N, K], added to ``out``.

    dy [M, N] and x [M, K] are 128x1 codes of all rows (rows without an expert zero); ``starts`` [G + 1]: expert g has
    the rows from starts[g] to starts[g + 1], multiples of 128. By definition `wgrad_fp8_matmul` expert by expert: one
    launch each, for DeepGEMM's grouped kernel wants every expert's codes apart in memory.
    """
    _expect("grouped_wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    if list(starts) != sorted(starts) or any(s % BLOCK for s in starts) or starts[-1] > dy.shape[0]:
        raise ValueError(
            f"grouped_wgrad_fp8_matmul: starts must ascend in multiples of 128 up to {dy.shape[0]} rows, got {starts}"
        )
    shape = (len(starts) - 1, dy.shape[1], x.shape[1])
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=dy.codes.device)
    for g, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop > start:
            rows, blocks = slice(start, stop), slice(start // BLOCK, stop // BLOCK)
            dy_part, x_part = (
                Quantised(q.codes[rows], q.scales[blocks], "128x1", q.scale_format) for q in (dy, x)
            )
            wgrad_fp8_matmul(dy_part, x_part, out[g])
    return out


def dgrad_fp8_matmul(dy: Quantised, w: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``reference.matmul.dgrad_fp8_matmul``: dy [M, N] (1x128) @ w [N, K] (128x128) -> [M, K]."""
    if not accepts(w.shape[1], w.shape[0]):
        return triton_matmul.dgrad_fp8_matmul(dy, w, out_dtype)
    _expect("dgrad_fp8_matmul", dy=(dy, "1x128"), w=(w, "128x128"))
    _same_contraction("dgrad_fp8_matmul", "dy columns", dy.shape[1], "w rows", w.shape[0])
    return _product(dy, _transposed_codes(w), w, True, out_dtype)


def _whole_blocks(q: Quantised) -> torch.Tensor:
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


def wgrad_fp8_matmul(dy: Quantised, x: Quantised, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_fp8_matmul``: dy [M, N].T @ x [M, K], both 128x1, -> fp32 [N, K], added to ``out``."""
    if dy.shape[1] % 64 or x.shape[1] % 64 or not dy.shape[0]:
        return triton_matmul.wgrad_fp8_matmul(dy, x, out)
    _expect("wgrad_fp8_matmul", dy=(dy, "128x1"), x=(x, "128x1"))
    _same_contraction("wgrad_fp8_matmul", "dy rows", dy.shape[0], "x rows", x.shape[0])
    if out is None:
        out = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.codes.device)
    # scales [M/128, C] are stored row by row: seen as [C, M/128] that is the TMA layout already.
    _fp8_accumulate_op(_whole_blocks(dy), dy.scales.t(), _whole_blocks(x), x.scales.t(), out, "mn")
    return out


def pack_weight(w: torch.Tensor) -> torch.Tensor:
    """What `invariant_matmul` keeps of a weight: the weight, with contiguous rows."""
    return w.detach().contiguous()


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


def dgrad_matmul(dy: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``reference.matmul.dgrad_matmul`` through cuBLAS: dy [M, N] @ w [N, K] -> [M, K], fp32 accumulation."""
    return dy @ w if out_dtype == dy.dtype else torch.mm(dy, w, out_dtype=out_dtype)


def wgrad_matmul(dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``reference.matmul.wgrad_matmul`` through cuBLAS: dy [M, N].T @ x [M, K] -> fp32 [N, K], added to ``out``."""
    if out is not None and dy.dtype == torch.float32:
        return out.addmm_(dy.t(), x)
    if out is not None:
        return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)
    return dy.t() @ x if dy.dtype == torch.float32 else torch.mm(dy.t(), x, out_dtype=torch.float32)


def implementations() -> dict[str, Implementation]:
    """The GEMMs. Their version names DeepGEMM, Triton (refused shapes) and the CUDA of cuBLAS."""
    fp8 = f"deep_gemm-{deep_gemm.__version__}+{triton_version()}"
    library = f"torch-{torch.__version__}"
    table = {
        f.__name__: Implementation(f"deepgemm.{f.__name__}", fp8, f)
        for f in (block_fp8_matmul, dgrad_fp8_matmul, wgrad_fp8_matmul, invariant_matmul, pack_weight)
    }
    for f in (dgrad_matmul, wgrad_matmul):
        table[f.__name__] = Implementation(f"cublas.{f.__name__}", library, f)
    return table


__all__ = [
    "accepts",
    "grouped_dgrad_fp8_matmul",
    "grouped_fp8_matmul",
    "grouped_wgrad_fp8_matmul",
    "implementations",
]
