"""What the libraries of Hopper GPUs register, on a machine that has none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import types

deep_gemm = types.ModuleType("deep_gemm")
deep_gemm.__version__, deep_gemm.fp8_gemm_nt, deep_gemm.bf16_gemm_nt = "0", None, None
flash = types.ModuleType("flash_attn_interface")
flash.__version__, flash.flash_attn_varlen_func = "0", None
sys.modules.update(deep_gemm=deep_gemm, flash_attn_interface=flash)

import precision_kernels as pk
from precision_kernels import bindings, dispatch

for there in (True, False):
    bindings.cublaslt_scales_blocks = lambda: there
    dispatch._bound.clear()
    pk.require("cuda", {"fp8"})
    bound = dispatch.table("cuda")
    assert set(bound) == set(dispatch.OPERATORS)
    for operator, chosen in bound.items():
        assert chosen.name == f"{bindings.library_of(operator, 'cuda')}.{operator}", (operator, chosen)
        assert chosen.identity.startswith(f"{chosen.name}@{chosen.version}#")
    print(bound["wgrad_fp8_matmul"].name, bound["dgrad_matmul"].name, bound["attention_backward"].name)
"""


def test_every_operator_of_cuda_has_the_implementation_that_the_table_names() -> None:
    """With empty modules in place of DeepGEMM and FlashAttention, every library registers functions with the parameters
    of their definitions, under the names of attestations. In a process of its own, as a library is asked for once.
    """
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "cublas.dgrad_matmul triton_or_torch_flash.attention_backward"
    assert done.stdout.splitlines() == [
        f"cublaslt.wgrad_fp8_matmul {expected}",
        f"deepgemm.wgrad_fp8_matmul {expected}",
    ]


_FEW_ROWS = """
import sys
import types

import torch

calls = []


def product(a, b, out, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    "As the library computes it, with what its 1D1D kernel refuses to be compiled for."
    (codes, scales), (other, other_scales) = a, b
    assert out.dtype == torch.bfloat16 or (out is c and len(out) > 32), "Invalid block size"
    assert scales.stride(0) == 1 and scales.stride(1) % 4 == 0, "TMA needs columns of 16 bytes"
    calls.append(len(codes))
    wide = codes.double() * scales.double().repeat_interleave(128, 1)
    columns = other_scales.double().repeat_interleave(128, 1)
    tall = columns if len(columns) == len(other) else columns.repeat_interleave(128, 0)
    result = wide @ (other.double() * tall[: len(other)]).T
    out.copy_(result + (0 if c is None else c.double()))


deep_gemm = types.ModuleType("deep_gemm")
deep_gemm.__version__, deep_gemm.fp8_gemm_nt, deep_gemm.bf16_gemm_nt = "0", product, None
sys.modules["deep_gemm"] = deep_gemm

from precision_kernels.hopper import deepgemm
from precision_kernels.reference import matmul, quantise
from precision_kernels.reference.formats import Quantised

torch.manual_seed(0)
weight = quantise.quantise_weight(torch.randn(256, 384).bfloat16())
for rows in (1, 2, 31, 32, 33, 64, 65):
    for name, columns in (("dgrad_fp8_matmul", 256), ("block_fp8_matmul", 384)):
        made = quantise.quantise_activation(torch.randn(rows, columns).bfloat16())
        aligned = torch.empty(columns // 128, -(-rows // 4) * 4).t()[:rows]
        aligned.copy_(made.scales)
        given = Quantised(**{**vars(made), "scales": aligned})
        for dtype in (torch.float32, torch.bfloat16):
            found = getattr(deepgemm, name)(given, weight, dtype)
            wanted = getattr(matmul, name)(made, weight, dtype)
            assert found.shape == wanted.shape and found.dtype == dtype, (name, rows, dtype)
            torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
assert min(calls) == 1 and calls.count(64) > 8, calls
"""


def test_fp32_products_of_few_rows_are_padded_to_a_tile_that_compiles() -> None:
    """With the definition in place of DeepGEMM: 1 to 65 rows give the reference's numbers, and its kernel for fp32
    results never gets the 32 rows or fewer for which it does not compile.
    """
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", _FEW_ROWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
