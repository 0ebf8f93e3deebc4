"""What only a Hopper GPU can show: DeepGEMM, FlashAttention-3, torch.compile, CUDA graphs, bindings."""

from __future__ import annotations

import importlib

import pytest
import torch

from precision_kernels import LinearFormats, bound_implementations, linear
from precision_kernels.dispatch import OPERATORS, implementation
from precision_kernels.reference.layout import AttentionLayout
from tests.edge_cases import assert_same_bits, normal

pytestmark = pytest.mark.gpu
CUDA = "cuda"
matmul = importlib.import_module("precision_kernels.reference.matmul")


def test_every_operator_is_bound_and_named():
    """On CUDA each operator has one named implementation with version and source hash, none the CPU's by accident."""
    bound = bound_implementations(CUDA)
    assert set(OPERATORS) == set(bound) - {"composition"}
    assert [k for k, v in bound.items() if v.startswith("reference.")] == ["rotary_cos_sin"]
    assert bound["block_fp8_matmul"].startswith("deepgemm.block_fp8_matmul@deep_gemm-")
    assert bound["wgrad_fp8_matmul"].startswith("cublaslt.wgrad_fp8_matmul@torch-")
    assert bound["attention"].startswith("flash_attention_3.attention@")


def test_rotary_table_has_the_cpus_bits():
    """The table is made by the definition; its bits do not depend on the device."""
    make = importlib.import_module("precision_kernels.reference.rotary").rotary_cos_sin
    inv_freq = 1e6 ** (-torch.arange(0, 128, 2) / 128)
    assert_same_bits(make(inv_freq.to(CUDA), 4096, torch.bfloat16), make(inv_freq, 4096, torch.bfloat16))


GEMM_SHAPES = [(1024, 4096), (4096, 1024), (192, 256), (130, 300), (576, 64)]
"""(N, K): DeepGEMM's, then shapes it refuses."""


def _op(name: str):
    return implementation(name, CUDA)


def _operands(m: int, n: int, k: int):
    x, w, dy = (normal(*s, seed=i).to(torch.bfloat16) for i, s in enumerate([(m, k), (n, k), (m, n)]))
    return x.to(CUDA), w.to(CUDA), dy.to(CUDA)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("n", "k"), GEMM_SHAPES)
def test_fp8_gemms_against_the_definition(n, k):
    """Forward, dgrad, wgrad (also accumulating) agree with the exact block GEMM: 2^-9 in bf16, 2^-11 in fp32."""
    x, w, dy = _operands(300, n, k)
    a, xc = _op("quantise_both")(x)
    d, dc = _op("quantise_both")(dy)
    b = _op("quantise_weight")(w)
    main = normal(n, k, 7).to(CUDA)
    errors = {}
    for out_dtype in (torch.bfloat16, torch.float32):
        errors["forward", out_dtype] = _error(
            _op("block_fp8_matmul")(a, b, out_dtype), matmul.block_fp8_matmul(a, b, torch.float32)
        )
        errors["dgrad", out_dtype] = _error(
            _op("dgrad_fp8_matmul")(d, b, out_dtype), matmul.dgrad_fp8_matmul(d, b, torch.float32)
        )
    errors["wgrad", torch.float32] = _error(_op("wgrad_fp8_matmul")(dc, xc), matmul.wgrad_fp8_matmul(dc, xc))
    errors["wgrad+", torch.float32] = _error(
        _op("wgrad_fp8_matmul")(dc, xc, main.clone()), matmul.wgrad_fp8_matmul(dc, xc, main.clone())
    )
    print({f"{name} {dtype}": f"{e:.1e}" for (name, dtype), e in errors.items()})
    for (name, dtype), error in errors.items():
        assert error < (2.0**-9 if dtype == torch.bfloat16 else 2.0**-11), f"{name} {dtype}: {error:.2e}"


@pytest.mark.parametrize(("n", "k"), GEMM_SHAPES)
def test_gemm_rows_do_not_depend_on_the_batch(n, k):
    """The first and last rows have the same bits for 1 to 8192 rows, FP8 and BF16."""
    x, w, _ = _operands(8192, n, k)
    b = implementation("quantise_weight", CUDA)(w)
    products = {
        "fp8": lambda t: _op("block_fp8_matmul")(_op("quantise_activation")(t), b),
        "fp8 to fp32": lambda t: _op("block_fp8_matmul")(_op("quantise_activation")(t), b, torch.float32),
        "bf16": lambda t: _op("invariant_matmul")(t, w),
    }
    for name, product in products.items():
        full = product(x)
        for m in (1, 2, 3, 5, 31, 32, 33, 127, 128, 129, 300, 1024):
            assert_same_bits(product(x[:m]), full[:m], f"{name} first {m}")
            assert_same_bits(product(x[-m:]), full[-m:], f"{name} last {m}")


@pytest.mark.parametrize("m", [128, 129, 300, 1024])
def test_cublaslt_computes_the_weight_gradient(m):
    """cuBLASLt's product of 1x128 blocks agrees with the definition to 2^-11, repeats its bits, adds to an output."""
    wgrad = importlib.import_module("precision_kernels.hopper.cublaslt").wgrad_fp8_matmul
    x, _, dy = _operands(m, 384, 256)
    dc, xc = _op("quantise_columns")(dy), _op("quantise_columns")(x)
    expected = matmul.wgrad_fp8_matmul(dc, xc)
    got, main = wgrad(dc, xc), normal(384, 256, 7).to(CUDA)
    assert got.dtype == torch.float32
    assert _error(got, expected) < 2.0**-11
    assert_same_bits(wgrad(dc, xc), got, "repeated")
    assert _error(wgrad(dc, xc, main.clone()), expected + main) < 2.0**-11


def test_padding_of_wgrad_is_zero():
    """Rows beyond M in the transposed codes are zero, so a ragged number of tokens adds nothing."""
    x, _, dy = _operands(129, 128, 256)
    columns = implementation("quantise_columns", CUDA)
    got = implementation("wgrad_fp8_matmul", CUDA)(columns(dy), columns(x))
    assert _error(got, matmul.wgrad_fp8_matmul(columns(dy), columns(x))) < 2.0**-11


FORMATS = [
    LinearFormats("fp8", "fp8", "fp8", "fp8"),
    LinearFormats("fp8", "bf16", "bf16", "fp8"),
    LinearFormats("fp8", "fp8", "bf16", "bf16", "ue8m0"),
    LinearFormats("bf16", "bf16", "bf16", "bf16"),
]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.forward}-{f.dgrad}-{f.wgrad}-{f.saved}")
def test_linear_gradients_match_the_cpu(formats):
    """Output and gradients of the linear agree between GPU and the CPU's definition, to bf16 rounding."""
    results = {}
    for device in ("cpu", CUDA):
        x = normal(200, 256).to(device, torch.bfloat16).requires_grad_()
        w = normal(192, 256, 1, 0.1).to(device).requires_grad_()
        bias = normal(1, 192, 2)[0].to(device).requires_grad_()
        y = linear(x, w, bias, formats)
        y.backward(normal(200, 192, 3).to(device, torch.bfloat16))
        results[device] = [t.detach().cpu() for t in (y, x.grad, w.grad, bias.grad)]
    for name, cpu, gpu in zip(("y", "dx", "dw", "dbias"), results["cpu"], results[CUDA], strict=True):
        assert _error(gpu, cpu) < 4e-3, f"{name}: {_error(gpu, cpu):.2e}"


def _attention_inputs(lengths, heads=8, kv_heads=2, dim=128, device=CUDA):
    tokens = sum(lengths)
    make = lambda h, s: normal(tokens, h * dim, s).to(device, torch.bfloat16).view(tokens, h, dim)  # noqa: E731
    cu = torch.tensor([0, *lengths]).cumsum(0).to(device)
    return make(heads, 0), make(kv_heads, 1), make(kv_heads, 2), AttentionLayout(cu)


def test_attention_follows_the_definition():
    """Output and log-sum-exp agree with the exact CPU attention to bf16 rounding."""
    lengths = [1, 17, 130, 64]
    q, k, v, layout = _attention_inputs(lengths)
    o, lse = implementation("attention", CUDA)(q, k, v, layout)
    expected, expected_lse = implementation("attention", "cpu")(
        q.cpu(), k.cpu(), v.cpu(), AttentionLayout(layout.cu_seqlens.cpu())
    )
    assert _error(o.cpu(), expected) < 5e-3
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_attention_rows_do_not_depend_on_batch_or_cache(dim):
    """A sequence has the same bits alone, packed, prefilled in chunks into any cache row, and decoded by token, with
    heads of any width (FlashAttention-3 itself gives narrow heads other bits in decode, see `attention_width`)."""
    lengths = [40, 200, 1, 77]
    q, k, v, layout = _attention_inputs(lengths, dim=dim)
    attention = implementation("attention", CUDA)
    packed, _ = attention(q, k, v, layout)
    a, b = 40, 240
    alone, _ = attention(q[a:b], k[a:b], v[a:b], AttentionLayout(torch.tensor([0, 200], device=CUDA)))
    assert_same_bits(alone, packed[a:b], "alone")
    cache = implementation("allocate_kv_cache", CUDA)(3, 256, 2, dim, torch.bfloat16, CUDA)
    parts, done = [], 0
    for step in (60, 7, 100, *[1] * 33):
        chunk = slice(a + done, a + done + step)
        chunk_layout = AttentionLayout(
            torch.tensor([0, step], device=CUDA),
            torch.tensor([done], device=CUDA),
            torch.tensor([2], device=CUDA),
        )
        parts.append(attention(q[chunk], k[chunk], v[chunk], chunk_layout, cache)[0])
        done += step
    assert_same_bits(torch.cat(parts), packed[a:b], "cached")


def test_attention_gradients():
    """dq, dk, dv agree with autograd of fp32 attention to 5e-3, and a second run repeats them bit for bit."""
    lengths = [65, 190]
    q, k, v, layout = _attention_inputs(lengths)
    o, lse = implementation("attention", CUDA)(q, k, v, layout)
    do = normal(255, 8 * 128, 5).to(CUDA, torch.bfloat16).view_as(o)
    backward = implementation("attention_backward", CUDA)
    grads = backward(do, q, k, v, o, lse, layout)
    leaves = [t.float().detach().requires_grad_() for t in (q, k, v)]
    outputs = []
    for start, stop in ((0, 65), (65, 255)):
        heads = [t[start:stop].transpose(0, 1) for t in leaves]
        wide = [heads[0], *(t.repeat_interleave(4, 0) for t in heads[1:])]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).transpose(0, 1)
        )
    torch.cat(outputs).backward(do.float())
    for name, got, leaf in zip(("dq", "dk", "dv"), grads, leaves, strict=True):
        assert _error(got, leaf.grad) < 5e-3, f"{name}: {_error(got, leaf.grad):.2e}"
    for first, second in zip(grads, backward(do, q, k, v, o, lse, layout), strict=True):
        assert_same_bits(second, first, "repeated")


def _decode_chain(weights):
    norm_weight, fused = weights
    ops = torch.ops.precision_kernels

    def chain(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, summed, _, codes, scales = ops.rms_norm(x, residual, norm_weight, 1e-6, False, True, False, 1e-30)
        gate_up = ops.deepgemm_fp8(codes, scales, fused.codes, fused.scales)
        gate, up = gate_up.chunk(2, -1)
        y, _, _ = ops.silu_mul(gate, up, True, False, False, 1e-30)
        return y, summed

    return chain


def _chain_inputs():
    weights = (
        normal(1, 1024)[0].to(CUDA, torch.bfloat16),
        implementation("quantise_weight", CUDA)(_operands(1, 4096, 1024)[1]),
    )
    return _decode_chain(weights), [normal(32, 1024, s).to(CUDA, torch.bfloat16) for s in (1, 2)]


def test_torch_compile_keeps_the_bits():
    """A chain of norm + quantise, FP8 GEMM and SiLU compiles as one graph without breaks and gives eager's bits."""
    chain, inputs = _chain_inputs()
    compiled = torch.compile(chain, fullgraph=True)
    for actual, expected in zip(compiled(*inputs), chain(*inputs), strict=True):
        assert_same_bits(actual, expected, "compiled")


def test_cuda_graph_replays_the_bits():
    """The chain is captured into a CUDA graph and replayed on new inputs with eager's bits."""
    chain, inputs = _chain_inputs()
    chain(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(*inputs)
    for tensor, seed in zip(inputs, (11, 12), strict=True):
        tensor.copy_(normal(32, 1024, seed))
    graph.replay()
    for actual, expected in zip(captured, chain(*inputs), strict=True):
        assert_same_bits(actual, expected, "replayed")
