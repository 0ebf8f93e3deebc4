"""Launch every Triton kernel on CPU tensors with a compiler for Hopper in the GPU's place: a program, not a test.

Triton compiles at a launch, for the dtypes and flags it is launched with, so the operators themselves are called. Their
results are not looked at. Prints what does not compile, which kernel no call reaches, and which one of `MIXES_ROWS`
reads under a mask that is false at compile time; then the exit status is 1.
`test_compiles_for_hopper.py` runs it in a process of its own, for this needs the compiler and other tests Triton's
interpreter, which is chosen at import. With --usage: registers, spilled bytes and shared memory of each kernel.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import precision_kernels.triton as kernels
from precision_kernels.reference.adamw import AdamWStep
from precision_kernels.reference.formats import ScaleFormat
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.reference.master import empty_low_half
from precision_kernels.reference.moments import MOMENT_FORMATS, empty_moment
from precision_kernels.triton import (
    activation,
    activation_codes,
    adamw,
    attention,
    digest,
    hopper_attention,
    logprobs,
    low_rank,
    matmul,
    norm,
    norm_columns,
    norm_rotary,
    quantise,
    rotary,
)

SCALES: tuple[ScaleFormat, ...] = "fp32", "ue8m0"
"""Of whole blocks of bf16; other launches take the first: a scale format is one branch, the same everywhere."""


class Hopper:
    """What Triton asks of a GPU's driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


MIXES_ROWS = (
    "adamw._adamw_kernel",
    "activation_codes._gradients_kernel",
    "activation_codes._product_kernel",
    "matmul._block_fp8_kernel",
    "norm._backward_kernel",
    "norm_columns._kernel",
    "packed_quantise._both_kernel",
    "quantise._columns_kernel",
    "quantise._weight_kernel",
    "wide_norm._wide_backward_kernel",
)
"""Kernels whose results depend on several rows: what a masked load gives counts (`triton.launch.jit_any_rows`)."""
compiled: dict[str, dict[str, object]] = {}
"""Kernels by module and name, each with the binaries of its launches by their hash."""
failures: list[str] = []


def name_of(kernel: JITFunction) -> str:
    """Module and function."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"


def compile_only(launch):
    """`JITFunction.run` that stops before the launch and remembers what came of it."""

    def run(self, *args, grid, warmup, **options):
        try:
            binary = launch(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            failures.append(f"{name_of(self)} {options}: {type(error).__name__}: {error}")
        else:
            compiled.setdefault(name_of(self), {})[binary.hash] = binary

    return run


def quantisers(x: torch.Tensor, scales: tuple[ScaleFormat, ...]) -> None:
    """x [M, K] and its transpose."""
    quantise.quantise_both(x.t())
    for scale in scales:
        quantise.quantise_both(x, scale)
        for function in (
            quantise.quantise_activation,
            quantise.quantise_columns,
            quantise.quantise_weight,
        ):
            quantise.dequantise(function(x, scale), x.dtype)


def products(x: torch.Tensor) -> None:
    """GEMMs of x [M, K] and of its codes."""
    rows, columns = quantise.quantise_both(x)
    weight, turned = quantise.quantise_weight(x), quantise.quantise_weight(x.t().contiguous())
    for out_dtype in {x.dtype, torch.float32}:
        matmul.block_fp8_matmul(rows, weight, out_dtype)
        matmul.dgrad_fp8_matmul(rows, turned, out_dtype)
        matmul.invariant_matmul(x, x, out_dtype)
    matmul.wgrad_fp8_matmul(columns, columns)
    matmul.wgrad_fp8_matmul(columns, columns, torch.zeros(x.shape[1], x.shape[1]))


def norms(x: torch.Tensor, scales: tuple[ScaleFormat, ...] = SCALES[:1]) -> None:
    """Rows x [M, D], with and without a residual, a quantiser and a gradient of the residual."""
    weight = x[0].clone()
    _, rstd = norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, x, weight, 1e-6)
    norm.rms_norm_backward(x, x, weight, rstd)
    norm.rms_norm_backward(x, x, weight, rstd, x)
    for scale in scales:
        norm.rms_norm_quantise(x, weight, 1e-6, scale)
        norm.add_rms_norm_quantise(x, x, weight, 1e-6, scale)
        norm_columns.rms_norm_quantise_columns(x, weight, rstd, 1e-6, scale)


def activations(both: torch.Tensor, scales: tuple[ScaleFormat, ...]) -> None:
    """Halves of both [M, 2K]."""
    (gate, up), dy = both.chunk(2, 1), both[:, ::2].contiguous()
    activation.silu_mul(gate, up)
    activation.silu_mul_backward(dy, gate, up)
    for scale in scales:
        activation.silu_mul_quantise(gate, up, scale)
        saved = activation.silu_mul_saving(gate, up, scale)[1:]
        activation.silu_mul_backward_saved(dy, *saved)
        activation_codes.silu_mul_quantise_both(gate, up, scale)
        activation_codes.silu_mul_backward_quantise_both(dy, gate, up, scale)


def heads(x: torch.Tensor, rotated: int) -> None:
    """x [T, H, D] split into q, k and v, the first ``rotated`` elements of a head rotated."""
    q, k, v = x.split([x.shape[1] - 2, 1, 1], 1)
    positions, table = torch.zeros(len(x), dtype=torch.int64), torch.zeros(8, rotated, dtype=x.dtype)
    weight = x[0, 0].clone()
    rotary.rotary(q, k, positions, table)
    rotary.rotary(q, k, positions, table, v)
    rotary.rotary_backward(q, k, positions, table)
    rotary.rotary_backward_joint(q, k, v, positions, table)
    norm_rotary.norm_rotary(q, k, weight, weight, 1e-6, positions, table)
    _, rstd = norm.rms_norm(q, weight, 1e-6)
    norm.rms_norm_backward(q, q, weight, rstd)


def attention_backward(dtype: torch.dtype) -> None:
    """Groups of two heads of every width that is served."""
    layout = AttentionLayout(torch.tensor([0, 130, 256]))
    for dim in attention.QUERIES:
        q, k = (torch.zeros(256, heads, dim, dtype=dtype) for heads in (4, 2))
        attention.attention_backward(q, q, k, k, q, torch.zeros(4, 256).t(), layout)
        tiles = attention.tile_table(layout.cu_seqlens, 256, hopper_attention.KEPT, seen=False)
        hopper_attention.launch(q, k, k, q, torch.zeros(4, 2, 512), k, k, tiles, 1.0)


def vocabulary(logits: torch.Tensor) -> None:
    """logits [T, V], with and without temperature and entropy."""
    ids, column = torch.zeros(len(logits), dtype=torch.int64), logits[:, 0].contiguous()
    for temperature, entropy in itertools.product((1.0, 0.7), (False, True)):
        logprobs.token_logprobs(logits, ids, temperature, entropy)
        dentropy = column if entropy else None
        logprobs.token_logprobs_backward(column, dentropy, logits, ids, column, dentropy, temperature)
    for temperature in (1.0, 0.7):
        logprobs.log_softmax(logits, temperature)
        logprobs.log_softmax_backward(logits, logits, temperature)


def optimiser(elements: int) -> None:
    """Every format of weights and moments."""
    step, shape = AdamWStep.of(1, 1e-3, (0.9, 0.99), 1e-8, 0.1), (elements,)
    for format in MOMENT_FORMATS:
        for dtype, split in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            moments = (empty_moment(shape, format, square) for square in (False, True))
            low_half = empty_low_half(shape) if split else None
            adamw.adamw(torch.zeros(shape, dtype=dtype), low_half, torch.zeros(shape), *moments, step)


def single_rows(x: torch.Tensor) -> None:
    """x [1, K]: the size that Triton would compile in."""
    quantisers(x, SCALES[:1])
    norms(x)
    activations(x, SCALES[:1])
    matmul.wgrad_fp8_matmul(*[quantise.quantise_columns(x)] * 2)


def never_loaded(binary) -> list[str]:
    """Loads under a predicate that is false at compile time; ptxas leaves their registers undefined."""
    never = set(re.findall(r"mov\.pred\s+(%p\d+), 0;", binary.asm["ptx"]))
    loads = re.findall(r"@(%p\d+) (ld\.global\.\S+)", binary.asm["ptx"])
    return sorted({load for predicate, load in loads if predicate in never})


def launch_all() -> None:
    """Whole blocks of bf16 as in training, and rows that cannot be packed, as which fp16 is handled too; fp32."""
    for dtype, rows, columns in (
        (torch.bfloat16, 256, 4096),
        (torch.bfloat16, 130, 190),
        (torch.float32, 130, 190),
    ):
        x, scales = torch.zeros(rows, columns, dtype=dtype), SCALES if rows == 256 else SCALES[:1]
        quantisers(x, scales)
        norms(x, scales)
        activations(x, scales)
        heads(torch.zeros(rows, 6, 128, dtype=dtype), 128)
    heads(torch.zeros(256, 6, 96, dtype=torch.bfloat16), 64)
    for dtype in (torch.bfloat16, torch.float16):
        attention_backward(dtype)
    products(torch.zeros(256, 4096, dtype=torch.bfloat16))
    products(torch.zeros(130, 192))
    single_rows(torch.zeros(1, 4096, dtype=torch.bfloat16))
    single_rows(torch.zeros(1, 190))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        low_rank.add_scaled(torch.zeros(130, 192, dtype=dtype), torch.zeros(130, 192), 2.0)
    norms(torch.zeros(4, 12288 + 4, dtype=torch.bfloat16))
    norms(torch.zeros(4, 14336, dtype=torch.float32))
    vocabulary(torch.zeros(4, 1000))
    vocabulary(torch.zeros(2048, 4096))
    digest.tensor_digest([torch.zeros(100)])
    for elements in (1 << 16, 130, 1):
        optimiser(elements)


def defined() -> set[str]:
    """All kernels of `precision_kernels.triton`: the compiled functions that are launched."""
    names = set()
    for info in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                names.add(name_of(value))
    return names


def usage(binary) -> str:
    """Registers, spilled bytes per thread and bytes of shared memory per program."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    warps, shared = binary.metadata.num_warps, binary.metadata.shared
    return f"{warps:2} warps {registers:>3} registers {spilled:>4} spilled {shared:6} shared"


def main() -> None:
    """Compile, print, exit."""
    driver.set_active(Hopper())
    JITFunction.run = compile_only(JITFunction.run)
    launch_all()
    failures.extend(
        f"{name}: no call in {__file__} launches it" for name in sorted(defined() - set(compiled))
    )
    failures.extend(
        f"{name} reads {loads} where its mask is false at compile time: mark it with jit_any_rows"
        for name in MIXES_ROWS
        for loads in map(never_loaded, compiled.get(name, {}).values())
        if loads
    )
    if "--usage" in sys.argv:
        for name, binaries in compiled.items():
            print(*sorted(f"{name:40} {usage(b)}" for b in binaries.values()), sep="\n")
    print(f"{sum(map(len, compiled.values()))} binaries of {len(compiled)} kernels")
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
