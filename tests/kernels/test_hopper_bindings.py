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
