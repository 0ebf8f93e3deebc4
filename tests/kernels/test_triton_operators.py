"""Every Triton operator but the quantisers against its definition, bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

from precision_kernels.reference.formats import Quantised
from tests.edge_cases import VALUE_CASES, assert_same_bits, normal, row_contexts, shapes, value_case
from tests.kernels.triton_cases import DEVICE, DTYPES, GPU, REFERENCE, TRITON, check, on_device, same

pytestmark = pytest.mark.slow

SMALL = [(3, 192), (129, 64)]
NORM_SHAPES = (
    shapes(full=True) if GPU else [(0, 64), (1, 1), (3, 192), (5, 576), (129, 64), (2, 4304), (1, 10944)]
)


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norms_on_shapes(shape):
    """RMSNorm, add + RMSNorm and both fused with the quantiser equal the definitions, rstd and residual included."""
    x, residual = normal(*shape).to(torch.bfloat16), normal(*shape, seed=1).to(torch.bfloat16)
    weight = normal(1, shape[1], seed=2)[0].to(torch.bfloat16)
    check("norm", "rms_norm", x, weight, 1e-6, what=str(shape))
    check("norm", "add_rms_norm", x, residual, weight, 1e-6, what=str(shape))
    check("norm", "rms_norm_quantise", x, weight, 1e-6, "ue8m0", reference="fused", what=str(shape))
    check("norm", "add_rms_norm_quantise", x, residual, weight, 1e-6, reference="fused", what=str(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_on_values(dtype):
    """Zeros, tiny, huge, infinite and NaN rows give the definition's bits."""
    for case in VALUE_CASES:
        x, residual = value_case(case, 5, 192, dtype), value_case(case, 5, 192, dtype, seed=3)
        weight = normal(1, 192, seed=2)[0].to(dtype)
        check("norm", "add_rms_norm", x, residual, weight, 1e-5, what=case)
        check("norm", "rms_norm_quantise", x, weight, 1e-5, reference="fused", what=case)


@pytest.mark.parametrize(
    "case", VALUE_CASES if GPU else ("60 binary orders of magnitude", "NaN and infinities")
)
def test_wide_norms_on_values(case):
    """Rows that are packed and shared by warps, a ragged last piece and slices among them, equal the definitions."""
    for columns in (1028, 4096, 4100, *((2052, 5120, 10944, 12288, 16388, 32768) if GPU else ())):
        x, residual = (value_case(case, 2, columns, torch.bfloat16, seed=s) for s in (0, 3))
        weight = normal(1, columns, seed=2)[0].to(torch.bfloat16)
        what = f"{columns} {case}"
        check("norm", "rms_norm", x, weight, 1e-5, what=what)
        check("norm", "add_rms_norm_quantise", x, residual, weight, 1e-5, reference="fused", what=what)
        check("norm", "rms_norm_quantise", x[:, 4:], weight[4:], 1e-5, "ue8m0", reference="fused", what=what)


@pytest.mark.parametrize("columns", [2304, 12544])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_norms_of_rows_that_are_not_packed(dtype, columns):
    """Rows of several chunks equal the definitions: held in registers, and so wide that they are read twice."""
    x, residual = (value_case("60 binary orders of magnitude", 2, columns, dtype, seed=s) for s in (0, 3))
    weight = normal(1, columns, seed=2)[0].to(dtype)
    check("norm", "rms_norm", x, weight, 1e-5)
    check("norm", "add_rms_norm_quantise", x, residual, weight, 1e-5, reference="fused")


def test_head_norms_read_slices_of_a_fused_projection():
    """[T, H, D] slices of a qkv matrix are normalised per head without a copy."""
    qkv, weight = normal(6, 10 * 64).to(torch.bfloat16), normal(1, 64)[0].to(torch.bfloat16)
    q = qkv.view(6, 10, 64)[:, 2:7]
    expected = REFERENCE["norm"].rms_norm(q, weight, 1e-6)
    actual = TRITON["norm"].rms_norm(qkv.to(DEVICE).view(6, 10, 64)[:, 2:7], weight.to(DEVICE), 1e-6)
    same(actual, expected, "head norm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv", "dim"), [(1, 2, 1, 64), (7, 4, 2, 128), (3, 3, 1, 96), (0, 2, 1, 64)]
)
def test_norm_and_rotation_of_heads_in_one_launch(tokens, heads, kv, dim, dtype):
    """Slices of a qkv matrix, normalised and turned at once, have the bits of norm, then rotation; other heads too."""
    qkv = normal(tokens, (heads + 2 * kv) * dim, 3, std=4.0).to(dtype)
    q, k, _ = qkv.view(tokens, heads + 2 * kv, dim).split([heads, kv, kv], 1)
    weights = [normal(1, dim, seed=s)[0].to(dtype) for s in (4, 5)]
    positions = torch.arange(tokens) * 37 % 101
    table = REFERENCE["rotary"].rotary_cos_sin(1e4 ** (-torch.arange(0, dim, 2) / dim), 128, dtype)
    expected = REFERENCE["fused"].norm_rotary(q, k, *weights, 1e-6, positions, table)
    qkv, *rest = on_device(qkv, *weights, positions, table)
    q, k, _ = qkv.view(tokens, heads + 2 * kv, dim).split([heads, kv, kv], 1)
    actual = TRITON["norm_rotary"].norm_rotary(q, k, *rest[:2], 1e-6, *rest[2:])
    for a, e, what in zip(actual, expected, "qk", strict=True):
        same(a, e, what)


@pytest.mark.parametrize("shape", [(1, 64), (33, 192), (130, 576)], ids=str)
def test_norm_backward(shape):
    """dx and dweight agree with the definition to the rounding of their sums (orders differ)."""
    x, dy, extra = (normal(*shape, seed=s) for s in (0, 1, 2))
    weight = normal(1, shape[1], seed=3)[0]
    _, rstd = REFERENCE["norm"].rms_norm(x, weight, 1e-6)
    for dresidual in (None, extra):
        expected = REFERENCE["norm"].rms_norm_backward(dy, x, weight, rstd, dresidual)
        arguments = on_device(dy, x, weight, rstd, dresidual)
        actual = TRITON["norm"].rms_norm_backward(*arguments)
        again = (
            TRITON["norm"].rms_norm_backward(*arguments) if GPU else actual
        )  # an interpreter has one order
        for a, e, r in zip(actual, expected, again, strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=2e-5, atol=2e-5)
            assert_same_bits(r, a, "repeated")


@pytest.mark.parametrize(
    "shape",
    [(1, 1024), (70 if GPU else 33, 1100), *([(8192, 4096), (33, 5120), (300, 8192)] if GPU else [])],
    ids=str,
)
def test_backward_of_wide_rows(shape):
    """Packed rows, gradients with a row stride too: dx is the definition's but for ties that the sum's order turns."""
    wide = importlib.import_module("precision_kernels.triton.wide_norm")
    x, extra, weight = (normal(*shape, seed=s).bfloat16() for s in (0, 1, 2))
    dy, weight = normal(shape[0], 2 * shape[1], seed=3).bfloat16()[:, : shape[1]], weight[0].clone()
    _, rstd = REFERENCE["norm"].rms_norm(x, weight, 1e-6)
    for dresidual in (None, extra):
        assert wide.accepts_backward(dy, x, weight, dresidual)
        expected = REFERENCE["norm"].rms_norm_backward(dy, x, weight, rstd, dresidual)
        arguments = on_device(dy, x, weight, rstd, dresidual)
        dx, dweight = (t.cpu() for t in TRITON["norm"].rms_norm_backward(*arguments))
        torch.testing.assert_close(dx, expected[0], rtol=2**-7, atol=1e-5)
        assert (dx != expected[0]).float().mean() < 1e-4
        torch.testing.assert_close(dweight, expected[1], rtol=2e-5, atol=2e-5 * shape[0] ** 0.5)
        if GPU:  # programs of a grid end in any order there; the interpreter has one order
            again = TRITON["norm"].rms_norm_backward(*arguments)
            assert_same_bits(again[0], dx, "repeated")
            assert_same_bits(again[1], dweight, "repeated")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype):
    """SiLU * up, its quantised form and its backward equal the definition, on halves of one matrix too."""
    for case in ("normal", "1e-20", "60 binary orders of magnitude", "infinities", "NaN"):
        both = value_case(case, 5, 600, dtype)
        gate, up = both.chunk(2, -1)
        dy = normal(5, 300, seed=4).to(dtype)
        device_gate, device_up = both.to(DEVICE).chunk(2, -1)
        same(
            TRITON["activation"].silu_mul(device_gate, device_up),
            REFERENCE["activation"].silu_mul(gate, up),
            case,
        )
        check("activation", "silu_mul_quantise", gate, up, reference="fused", what=case)
        check("activation", "silu_mul_backward", dy, gate, up, what=case)
        y, *saved = TRITON["activation"].silu_mul_saving(device_gate, device_up)
        expected, *expected_saved = REFERENCE["fused"].silu_mul_saving(gate, up)
        same((y, *saved), (expected, *expected_saved), f"saving {case}")
        gradients = TRITON["activation"].silu_mul_backward_saved(dy.to(DEVICE), *saved)
        same(gradients, REFERENCE["fused"].silu_mul_backward_saved(dy, *expected_saved), f"saved {case}")


@pytest.mark.parametrize(
    "shape", [(0, 64), (129, 192), *([(8192, 4304), (3, 10944)] if GPU else [])], ids=str
)
def test_silu_mul_on_shapes(shape):
    """Empty, ragged and large inputs give the definition's bits."""
    gate, up = normal(*shape).to(torch.bfloat16), normal(*shape, seed=1).to(torch.bfloat16)
    check("activation", "silu_mul", gate, up, what=str(shape))
    check("activation", "silu_mul_quantise", gate, up, "ue8m0", reference="fused", what=str(shape))
    check("activation", "silu_mul_saving", gate, up, "ue8m0", reference="fused", what=str(shape))


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (128, 128), (80, 80), (64, 48)])
def test_rotary(head_dim, rotated):
    """Rotation and its backward equal the definition, partial rotation and strided heads included."""
    for dtype in DTYPES:
        inv_freq = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
        table = REFERENCE["rotary"].rotary_cos_sin(inv_freq, 50, dtype)
        q, k = (
            normal(7, 3 * head_dim).to(dtype).view(7, 3, -1),
            normal(7, 2 * head_dim, 1).to(dtype).view(7, 2, -1),
        )
        positions = torch.tensor([0, 1, 49, 7, 7, 3, 20])
        for name in ("rotary", "rotary_backward"):
            check("rotary", name, q, k, positions, table, what=f"{head_dim} {dtype}")
            check("rotary", name, q[:, 1:], k[:, :1], positions, table, what="slices")
        check("rotary", "rotary", q, k[:, 1:], positions, table, k[:, :1], what=f"with v, {head_dim} {dtype}")
        check(
            "rotary", "rotary_backward_joint", q, k, k.flip(0), positions, table, what=f"{head_dim} {dtype}"
        )


@pytest.mark.parametrize("vocabulary", [1, 100, 4096, 9001, *([151_936] if GPU else [])])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs(vocabulary, temperature):
    """Log-probs, entropy, log-sum-exp and their gradient equal the definition, with -inf logits and NaN rows."""
    logits = normal(4, vocabulary, std=5.0)
    logits[1, ::2] = -float("inf")
    logits[1, 0] = 1.0
    logits[3, vocabulary // 2] = float("nan")
    ids = torch.tensor([0, 0, vocabulary - 1, vocabulary // 3])
    for entropy in (False, True):
        check("logprobs", "token_logprobs", logits, ids, temperature, entropy, what=str(vocabulary))
    check("logprobs", "log_softmax", logits, temperature, what=str(vocabulary))
    dlogp, dentropy = torch.randn(4), torch.randn(4)
    _, entropy, lse = REFERENCE["logprobs"].token_logprobs(logits, ids, temperature, True)
    for arguments in ((dlogp, None), (None, dentropy), (dlogp, dentropy)):
        check("logprobs", "token_logprobs_backward", *arguments, logits, ids, lse, entropy, temperature)


def test_log_softmax_backward():
    """Agrees with the definition to the rounding of the row sum."""
    y = REFERENCE["logprobs"].log_softmax(normal(3, 5000, std=3.0), 1.0)
    dy = normal(3, 5000, seed=1)
    expected = REFERENCE["logprobs"].log_softmax_backward(dy, y, 0.5)
    actual = TRITON["logprobs"].log_softmax_backward(*on_device(dy, y, 0.5))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-4)


def _row_operators(row: torch.Tensor):
    """(name, function from a batch [M, K] to tensors whose first dimension is M)."""
    k = row.shape[0]
    weight = normal(1, k, seed=8)[0].to(row.dtype).to(DEVICE)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    codes = lambda q: (q.codes.view(torch.uint8), q.scales)  # noqa: E731
    yield "quantise_activation", lambda x: codes(TRITON["quantise"].quantise_activation(x))
    yield "rms_norm", lambda x: TRITON["norm"].rms_norm(x, weight, 1e-6)
    yield (
        "add_rms_norm_quantise",
        lambda x: codes(TRITON["norm"].add_rms_norm_quantise(x, x, weight, 1e-6)[0]),
    )
    yield "silu_mul_quantise", lambda x: codes(TRITON["activation"].silu_mul_quantise(x, x))
    yield "token_logprobs", lambda x: TRITON["logprobs"].token_logprobs(x.float(), ids.expand(len(x)))[0]
    yield "log_softmax", lambda x: TRITON["logprobs"].log_softmax(x.float())
    matrix = normal(96, k, seed=9).to(row.dtype).to(DEVICE)
    yield "invariant_matmul", lambda x: TRITON["matmul"].invariant_matmul(x, matrix)
    quantised = TRITON["quantise"].quantise_weight(matrix)
    quantise = TRITON["quantise"].quantise_activation
    yield "block_fp8_matmul", lambda x: TRITON["matmul"].block_fp8_matmul(quantise(x), quantised)


def test_a_rows_bits_depend_on_that_row_alone():
    """Each operator gives a row the same bits alone, in any batch, at any index, beside NaN and infinite rows."""
    row = normal(1, 192, seed=11)[0].to(torch.bfloat16)
    for name, function in _row_operators(row):
        alone = None
        for context, batch, index in row_contexts(row):
            if len(batch) > 8 and not GPU:
                continue  # the interpreter needs milliseconds per program; the GPU run takes every context
            out = function(batch.to(DEVICE))
            picked = [t[index] for t in (out if isinstance(out, tuple) else (out,))]
            alone = picked if alone is None else alone
            same(picked, alone, f"{name}: {context}")


@pytest.mark.parametrize(("m", "n", "k"), [(5, 192, 192), (65, 130, 300), (1, 64, 128)])
def test_gemms_follow_the_definition(m, n, k):
    """The Triton GEMMs agree with the exact ones: to fp32 rounding when interpreted, to 2^-11 on tensor cores."""
    x, w, dy = normal(m, k), normal(n, k, 1), normal(m, n, 2)
    tolerance = 2.0**-11 if GPU else 2.0**-22
    quantise, out = REFERENCE["quantise"], normal(n, k, 3)
    a, b = quantise.quantise_activation(x), quantise.quantise_weight(w)
    d = quantise.quantise_activation(dy)
    dc, xc = quantise.quantise_columns(dy), quantise.quantise_columns(x)
    move = lambda q: Quantised(q.codes.to(DEVICE), q.scales.to(DEVICE), q.kind)  # noqa: E731
    pairs = [
        ("block_fp8_matmul", (a, b, torch.float32)),
        ("dgrad_fp8_matmul", (d, b, torch.float32)),
        ("wgrad_fp8_matmul", (dc, xc)),
        ("wgrad_fp8_matmul", (dc, xc, out)),
    ]
    for name, arguments in pairs:
        moved = [
            move(v) if isinstance(v, Quantised) else v.to(DEVICE) if isinstance(v, torch.Tensor) else v
            for v in arguments
        ]
        actual = getattr(TRITON["matmul"], name)(
            *[v.clone() if isinstance(v, torch.Tensor) else v for v in moved]
        )
        expected = getattr(REFERENCE["matmul"], name)(
            *[v.clone() if isinstance(v, torch.Tensor) else v for v in arguments]
        )
        error = (actual.cpu() - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_gemm_follows_the_definition(dtype):
    """fp32 accumulation stays within 2^-20 of the fp64 definition (ragged shapes, fp32 output)."""
    x, w = normal(5, 300).to(dtype), normal(130, 300, 1).to(dtype)
    expected = REFERENCE["matmul"].invariant_matmul(x, w, torch.float32)
    actual = TRITON["matmul"].invariant_matmul(x.to(DEVICE), w.to(DEVICE), torch.float32).cpu()
    assert (actual - expected).norm() / expected.norm() < 2.0**-20


def test_fakes_describe_the_real_outputs():
    """torch.library.opcheck accepts every custom op: schema, fake shapes and strides, no hidden mutation."""
    x = normal(130, 192).to(torch.bfloat16).to(DEVICE)
    weight = normal(1, 192)[0].to(torch.bfloat16).to(DEVICE)
    ops = torch.ops.precision_kernels
    logits, ids = normal(3, 200).to(DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    calls = [
        (ops.quantise_rows, (x, False, 1e-30)),
        (ops.quantise_columns, (x, True, 1e-30)),
        (ops.quantise_both, (x, True, 1e-30)),
        (
            ops.dequantise,
            (x.to(torch.float8_e4m3fn), torch.ones(130, 2, device=DEVICE), 1, 128, torch.bfloat16),
        ),
        (ops.quantise_weight, (x, False, 1e-30, True)),
        (ops.rms_norm, (x, x.clone(), weight, 1e-6, True, True, False, 1e-30)),
        (ops.silu_mul, (x, x.clone(), True, True, False, 1e-30)),
        (ops.silu_mul_saving, (x, x.clone(), False, 1e-30)),
        (ops.silu_mul_backward, (x, x.clone(), None, x.clone(), None)),
        (ops.token_logprobs, (logits, ids, 1.0, True)),
        (ops.log_softmax, (logits, 1.0)),
        (ops.invariant_gemm, (x, x.clone(), torch.float32)),
    ]
    for op, arguments in calls:
        checks = ["test_schema", "test_faketensor"]
        # torch cannot multiply fp8 tensors, which its schema check does with every input.
        torch.library.opcheck(op.default, arguments, test_utils=checks[op is ops.dequantise :])
