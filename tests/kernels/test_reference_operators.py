"""Norms, SiLU, rotary, log-probabilities: formulas, row-invariance, and gradients against fp64 autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import precision_kernels as pk
from precision_kernels import reference
from tests.edge_cases import (
    FINITE_VALUE_CASES,
    assert_same_bits,
    generator,
    layouts,
    normal,
    row_contexts,
    value_case,
    value_cases,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inv_freq(head_dim: int = 64) -> torch.Tensor:
    """The usual rotary frequencies for theta 10000."""
    return 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)


ROW_OPERATORS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rms_norm": lambda x: (pk.rms_norm(x, _weight(x), 1e-6),),
    "add_rms_norm": lambda x: pk.add_rms_norm(x, x.flip(-1), _weight(x), 1e-6),
    "silu_mul": lambda x: (pk.silu_mul(x, x.flip(-1)),),
    "log_softmax": lambda x: (pk.log_softmax(x.float(), 0.7),),
    "token_logprobs": lambda x: pk.token_logprobs(
        x.float(), torch.full((len(x),), x.shape[1] // 2), 0.7, True
    ),
    "rms_norm_quantise": lambda x: _parts(pk.rms_norm_quantise(x, _weight(x), 1e-6)),
    "silu_mul_quantise": lambda x: _parts(pk.silu_mul_quantise(x, x.flip(-1))),
}


def _weight(x: torch.Tensor) -> torch.Tensor:
    return normal(1, x.shape[-1], 77)[0].to(x.dtype)


def _parts(q: reference.Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    return q.codes, q.scales


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_a_row_alone_equals_the_row_in_any_batch_and_layout(name: str, dtype: torch.dtype) -> None:
    """Bits of a row do not depend on batch, position, NaN neighbours, strides, or threads (1 and 2).

    77 puts rows at every offset of a vector register; fp32 shows what rounding to bf16 would hide.
    """
    operator = ROW_OPERATORS[name]
    before = torch.get_num_threads()
    try:
        for dim in (77, 192, 4304):
            row = normal(1, dim, 3)[0].to(dtype)
            alone = operator(row[None])
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for context, batch, i in row_contexts(row):
                    for actual, expected in zip(operator(batch), alone, strict=True):
                        assert_same_bits(actual[i : i + 1], expected, f"{context} {dim} {threads} threads")
                together = operator(batch)
                for layout, view in layouts(batch):
                    for actual, expected in zip(operator(view), together, strict=True):
                        assert_same_bits(actual, expected, f"{layout} {dim} {threads} threads")
                wide = normal(300, dim, 6).to(dtype)
                together = operator(wide)
                for actual, expected in zip(operator(wide.t().contiguous().t()), together, strict=True):
                    assert_same_bits(actual, expected, f"transposed {dim} {threads} threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_follows_its_written_rounding_order(dtype: torch.dtype) -> None:
    """Bits equal the formula with an independent mean square (fp64, rounded once) except where that rounds
    apart.

    lane_sum errs by at most 14 roundings of 2^-24, its square root by half of that, and four more
    operations follow:
    12 * 2^-24 in fp32. In bf16 and fp16 that flips both roundings of fewer than 1 % of the results.
    """
    tolerance = 12 * 2.0**-24 if dtype == torch.float32 else 2.1 * torch.finfo(dtype).eps
    for dim in (64, 128, 576, 4304):
        x, weight = normal(20, dim, 1).to(dtype), normal(1, dim, 2)[0].to(dtype)
        y = pk.rms_norm(x, weight, 1e-5)
        rstd = (1.0 / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()).float()
        expected = ((x.float() * rstd).to(dtype).float() * weight.float()).to(dtype)
        torch.testing.assert_close(y.double(), expected.double(), rtol=tolerance, atol=0)
        if dtype != torch.float32:
            assert float((y != expected).float().mean()) < 0.01


def test_add_rms_norm_is_the_norm_of_the_rounded_sum() -> None:
    """(y, residual) == (rms_norm(s), s) with s the rounded sum, on every value case, bit for bit."""
    for dtype in DTYPES:
        for name, x in value_cases(5, 192, dtype):
            residual, weight = normal(5, 192, 8).to(dtype), normal(1, 192, 9)[0].to(dtype)
            y, summed = pk.add_rms_norm(x, residual, weight, 1e-6)
            assert_same_bits(summed, x + residual, name)
            assert_same_bits(y, pk.rms_norm(x + residual, weight, 1e-6), name)


def test_fused_quantisers_equal_their_parts() -> None:
    """rms_norm_quantise, add_rms_norm_quantise and silu_mul_quantise are compositions, bit for bit."""
    x, other, weight = (normal(5, 192, s).bfloat16() for s in (1, 2, 3))
    for scale_format in ("fp32", "ue8m0"):
        pairs = [
            (pk.rms_norm_quantise(x, weight[0], 1e-6, scale_format), pk.rms_norm(x, weight[0], 1e-6)),
            (
                pk.add_rms_norm_quantise(x, other, weight[0], 1e-6, scale_format)[0],
                pk.add_rms_norm(x, other, weight[0], 1e-6)[0],
            ),
            (pk.silu_mul_quantise(x, other, scale_format), pk.silu_mul(x, other)),
        ]
        for fused, y in pairs:
            q = reference.quantise_activation(y, scale_format)
            assert_same_bits(fused.codes, q.codes)
            assert_same_bits(fused.scales, q.scales)


def test_a_fused_quantiser_refuses_to_drop_a_gradient() -> None:
    """Codes carry no gradient, so an input that wants one is an error."""
    with pytest.raises(RuntimeError, match="no gradient flows"):
        pk.silu_mul_quantise(normal(2, 128).requires_grad_(), normal(2, 128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_rounds_the_activation_before_the_product(dtype: torch.dtype) -> None:
    """y = round(round(silu(g)) * u); the activation is within 4 fp32 ulp and one rounding of fp64 silu."""
    for case in FINITE_VALUE_CASES:
        gate, up = value_case(case, 5, 192, dtype), normal(5, 192, 4).to(dtype)
        silu = pk.silu_mul(gate, torch.ones_like(gate))
        assert_same_bits(pk.silu_mul(gate, up), (silu.float() * up.float()).to(dtype), case)
        g = gate.double()
        truth = g * torch.sigmoid(g)
        bound = truth.abs() * (torch.finfo(dtype).eps / 2 + 4 * 2.0**-24) + torch.finfo(dtype).smallest_normal
        assert bool(((silu.double() - truth).abs() <= bound).all()), case


def test_rotary_table_is_the_rounded_fp64_cosine_at_any_length() -> None:
    """cos and sin of fp32 angles to 1e-7 (fp32 rounding) up to 131072 positions; a longer table starts with
    the same bits.
    """
    table = pk.rotary_cos_sin(inv_freq(), 131072, torch.float32)
    angles = (torch.arange(131072).float()[:, None] * inv_freq()[None]).double()
    assert float((table[:, :32].double() - angles.cos()).abs().max()) < 2.0**-24
    assert float((table[:, 32:].double() - angles.sin()).abs().max()) < 2.0**-24
    for length in (1, 7, 33):
        short = pk.rotary_cos_sin(inv_freq(), length, torch.bfloat16)
        assert_same_bits(short, table[:length].bfloat16(), str(length))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_once_and_leaves_the_unrotated_rest(dtype: torch.dtype) -> None:
    """Equals the fp32 formula with a rounded table, per head; a 32-wide table leaves elements 32.. of 64
    untouched.
    """
    table = pk.rotary_cos_sin(inv_freq(32), 40, dtype)
    q, k = normal(9 * 4, 64, 1).to(dtype).view(9, 4, 64), normal(9 * 2, 64, 2).to(dtype).view(9, 2, 64)
    positions = torch.tensor([0, 39, 1, 5, 5, 7, 20, 21, 22])
    rotated, k_rotated = pk.rotary(q, k, positions, table)
    for t in range(9):
        cos, sin = table[positions[t], :16].float(), table[positions[t], 16:].float()
        x1, x2 = q[t, 1, :16].float(), q[t, 1, 16:32].float()
        assert_same_bits(rotated[t, 1, :16], (x1 * cos - x2 * sin).to(dtype))
        assert_same_bits(rotated[t, 1, 16:32], (x2 * cos + x1 * sin).to(dtype))
    assert_same_bits(rotated[..., 32:], q[..., 32:])
    assert_same_bits(k_rotated[0], k[0], "position 0 turns nothing")


def test_token_logprobs_are_the_log_softmax_at_the_ids() -> None:
    """Same bits as log_softmax + gather; within 4e-7 * (1 + max |z|) of fp64; entropy likewise; removed
    tokens count 0.
    """
    logits = normal(50, 1000, 1, std=5.0)
    logits[:, ::3] = float("-inf")
    ids = torch.randint(0, 333, (50,), generator=generator(2)) * 3 + 1
    logp, entropy = pk.token_logprobs(logits, ids, 0.7, True)
    assert_same_bits(logp, pk.log_softmax(logits, 0.7).gather(1, ids[:, None])[:, 0])
    truth = (logits.double() / 0.7).log_softmax(-1)
    bound = 4e-7 * (1 + float(logits[:, 1].abs().max()) / 0.7 + 20)
    assert float((logp.double() - truth.gather(1, ids[:, None])[:, 0]).abs().max()) < bound
    exact = -(truth.exp() * truth.clamp(min=-1e30)).sum(-1)
    assert entropy is not None
    assert float((entropy.double() - exact).abs().max()) < bound
    assert pk.token_logprobs(logits, torch.zeros_like(ids), 0.7)[0].tolist() == [float("-inf")] * 50


def test_token_logprobs_of_no_rows() -> None:
    """An empty batch gives empty results."""
    logp, entropy = pk.token_logprobs(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 1.0, True)
    assert logp.shape == (0,)
    assert entropy is not None
    assert entropy.shape == (0,)


def _gradients(function: Callable, inputs: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [normal(1, y.numel(), seed + i).view(y.shape).to(y.dtype) for i, y in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, leaves, cotangents))


def _norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rotate64(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(5).double()[:, None] * inv_freq().double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., :32] * cos - x[..., 32:] * sin, x[..., 32:] * cos + x[..., :32] * sin), -1)

    return turn(q), turn(k)


def _entropy64(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (logits / 0.7).log_softmax(-1)
    return logp[:, 3], -(logp.exp() * logp).sum(-1)


_IDS = torch.full((5,), 3)
DIFFERENTIABLE: dict[str, tuple[Callable, Callable, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: pk.rms_norm(x, w, 1e-6), _norm64, [(5, 192), (192,)]),
    "add_rms_norm": (
        lambda x, r, w: pk.add_rms_norm(x, r, w, 1e-6),
        lambda x, r, w: (_norm64(x + r, w), x + r),
        [(5, 192), (5, 192), (192,)],
    ),
    "silu_mul": (pk.silu_mul, lambda g, u: torch.nn.functional.silu(g) * u, [(5, 192), (5, 192)]),
    "rotary": (
        lambda q, k: pk.rotary(q, k, torch.arange(5), pk.rotary_cos_sin(inv_freq(), 5, q.dtype)),
        _rotate64,
        [(5, 4, 64), (5, 2, 64)],
    ),
    "log_softmax": (lambda x: pk.log_softmax(x, 0.7), lambda x: (x / 0.7).log_softmax(-1), [(5, 192)]),
    "token_logprobs": (lambda x: pk.token_logprobs(x, _IDS, 0.7, True), _entropy64, [(5, 192)]),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_fp32_gradients_match_fp64_autograd(name: str) -> None:
    """Relative error below 2e-6: some ten fp32 roundings and sums of 192 terms."""
    ours, truth, shapes = DIFFERENTIABLE[name]
    inputs = [normal(1, torch.Size(s).numel(), 10 + i).view(s) for i, s in enumerate(shapes)]
    actual = _gradients(ours, inputs)
    expected = _gradients(truth, [x.double() for x in inputs])
    for a, e in zip(actual, expected, strict=True):
        assert float((a.double() - e).norm() / e.norm()) < 2e-6


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "rotary"])
def test_bf16_gradients_match_fp64_autograd_of_the_same_inputs(name: str) -> None:
    """Relative error below 1 %: two to three bf16 roundings (2^-9 each, the table's included) of values and
    gradients.
    """
    ours, truth, shapes = DIFFERENTIABLE[name]
    inputs = [normal(1, torch.Size(s).numel(), 10 + i).view(s).bfloat16() for i, s in enumerate(shapes)]
    actual = _gradients(ours, inputs)
    expected = _gradients(truth, [x.double() for x in inputs])
    for x, a, e in zip(inputs, actual, expected, strict=True):
        assert a.dtype == x.dtype
        assert float((a.double() - e).norm() / e.norm()) < 0.01


def test_gradients_agree_with_finite_differences() -> None:
    """Directional derivatives by central differences of fp64 truth confirm the analytic fp64 functions used
    above.
    """
    for name, (_, truth, shapes) in DIFFERENTIABLE.items():
        inputs = [
            normal(1, torch.Size(s).numel(), 20 + i).view(s).double().requires_grad_()
            for i, s in enumerate(shapes)
        ]
        assert torch.autograd.gradcheck(truth, inputs, fast_mode=True), name


def test_silu_mul_saves_codes_when_told_to() -> None:
    """saved="fp8": no tensor of 2 bytes per element is kept, and the gradient is that of the dequantised
    inputs.
    """
    gate, up = normal(8, 256, 1).bfloat16().requires_grad_(), normal(8, 256, 2).bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pk.silu_mul(gate, up, "fp8")
    assert sum(t.numel() * t.element_size() for t in kept) == 2 * (8 * 256 + 8 * 2 * 4)
    dy = normal(8, 256, 3).bfloat16()
    actual = torch.autograd.grad(y, (gate, up), dy)
    seen = [reference.quantise_activation(t.detach()).dequantise(torch.bfloat16) for t in (gate, up)]
    for a, e in zip(actual, reference.silu_mul_backward(dy, *seen), strict=True):
        assert_same_bits(a, e)
    plain = torch.autograd.grad(pk.silu_mul(gate, up), (gate, up), dy)
    assert not torch.equal(plain[0], actual[0])


def test_wrong_arguments_are_named() -> None:
    """Shape and dtype errors carry what was given."""
    with pytest.raises(ValueError, match=r"weight must have shape \(64,\), got \(32,\)"):
        pk.rms_norm(normal(2, 64), torch.ones(32), 1e-6)
    with pytest.raises(ValueError, match=r"residual must be torch.float32 \(2, 64\), got torch.bfloat16"):
        pk.add_rms_norm(normal(2, 64), normal(2, 64).bfloat16(), torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match="gate and up"):
        pk.silu_mul(normal(2, 64), normal(2, 32))
    with pytest.raises(ValueError, match="temperature positive"):
        pk.log_softmax(normal(2, 64), 0.0)
    with pytest.raises(ValueError, match="ids must be int64"):
        pk.token_logprobs(normal(2, 64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype of q and k"):
        pk.rotary(
            normal(2, 64).view(1, 2, 64),
            normal(1, 64).view(1, 1, 64),
            torch.zeros(1).long(),
            torch.ones(4, 128),
        )
