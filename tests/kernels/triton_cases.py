"""The Triton operators beside their definitions: the kernel runs on a GPU where there is one and under the interpreter
otherwise, the definition on the CPU."""

from __future__ import annotations

import importlib

import torch

from precision_kernels.reference.formats import Quantised
from tests.edge_cases import assert_same_bits

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REFERENCE = {
    name: importlib.import_module(f"precision_kernels.reference.{name}")
    for name in ("quantise", "norm", "fused", "activation", "rotary", "logprobs", "matmul", "low_rank")
}
TRITON = {
    name: importlib.import_module(f"precision_kernels.triton.{name}")
    for name in ("quantise", "norm", "norm_rotary", "activation", "rotary", "logprobs", "matmul", "low_rank")
}


def same(actual, expected, what: str) -> None:
    """Bitwise equality of tensors, `Quantised` and tuples of them."""
    if isinstance(expected, Quantised):
        assert (actual.kind, actual.scale_format) == (expected.kind, expected.scale_format), what
        same(actual.scales, expected.scales, f"{what} scales")
        same(actual.codes.cpu(), expected.codes, f"{what} codes")
    elif isinstance(expected, torch.Tensor):
        assert_same_bits(actual, expected, what)
    elif expected is None:
        assert actual is None, what
    else:
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            same(a, e, f"{what}[{i}]")


def on_device(*values):
    """Tensors moved, the rest as it is."""
    return [v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in values]


def check(module: str, name: str, *arguments, reference: str | None = None, what: str = "") -> None:
    """The operator ``name`` of both sides gives the same bits."""
    expected = getattr(REFERENCE[reference or module], name)(*arguments)
    actual = getattr(TRITON[module], name)(*on_device(*arguments))
    same(actual, expected, f"{name} {what}")
