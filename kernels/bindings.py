"""Which library runs an operator on a device: the one place where that is decided, from facts of the device.

A table, not a search: no library takes the place of another one because an import failed. A library that is needed and
missing is an error that says what to install (`dispatch.require`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Library(NamedTuple):
    """Where a library's implementations are, and what to do if it cannot be imported.

    module: importing it registers what the library offers (`declaration.implements`).
    """

    module: str
    remedy: str


_ATTENTION = Library("precision_kernels.hopper.flash_attention", "install vllm or flash_attn_3")
LIBRARIES: dict[str, Library] = {
    "reference": Library("precision_kernels.reference", "reinstall rllib-llm"),
    "triton": Library("precision_kernels.triton", "install triton, which a CUDA build of torch brings along"),
    "deepgemm": Library(
        "precision_kernels.hopper.deepgemm",
        "install deep_gemm or vllm, with nvcc on the PATH; or ask for the slower GEMMs with "
        "precision_kernels.bind_library('triton', 'cuda', precision_kernels.TRITON_GEMMS)",
    ),
    "cublas": Library("precision_kernels.hopper.cublas", "install a CUDA build of torch"),
    "cublaslt": Library(
        "precision_kernels.hopper.cublaslt", "install deep_gemm or vllm, with nvcc on the PATH"
    ),
    "flash_attention_3": _ATTENTION,
    "triton_or_torch_flash": _ATTENTION,
}

CUDA: dict[str, str] = {
    "block_fp8_matmul": "deepgemm",
    "dgrad_fp8_matmul": "deepgemm",
    "invariant_matmul": "deepgemm",
    "pack_weight": "deepgemm",
    "dgrad_matmul": "cublas",
    "wgrad_matmul": "cublas",
    "attention": "flash_attention_3",
    "allocate_kv_cache": "flash_attention_3",
    "attention_backward": "triton_or_torch_flash",
    "rotary_cos_sin": "reference",
}
"""Operators that CUDA runs by another library than Triton. `wgrad_fp8_matmul` depends on the GPU, see `library_of`."""

TRITON_GEMMS = ("block_fp8_matmul", "dgrad_fp8_matmul", "wgrad_fp8_matmul")
"""GEMMs that Triton offers too. DeepGEMM is what this library is measured with; a slower GEMM is bound on request only
(`dispatch.bind_library`)."""


def library_of(operator: str, device_type: str) -> str | None:
    """The library that runs an operator on "cpu" or "cuda"; None for another type of device, for which none does."""
    if device_type == "cpu":
        return "reference"
    if device_type != "cuda":
        return None
    if operator == "wgrad_fp8_matmul":
        return "cublaslt" if cublaslt_scales_blocks() else "deepgemm"
    return CUDA.get(operator, "triton")


@functools.cache
def cublaslt_scales_blocks() -> bool:
    """Whether cuBLASLt has a GEMM with 1x128 scales here: CUDA 12.9, `torch.nn.functional.scaled_mm` (torch 2.10) and
    a GPU of compute capability 9.0.
    """
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if not hasattr(F, "scaled_mm") or cuda < (12, 9) or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() == (9, 0)


__all__ = ["CUDA", "LIBRARIES", "TRITON_GEMMS", "Library", "cublaslt_scales_blocks", "library_of"]
