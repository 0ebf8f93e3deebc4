"""Weights in two halves, moments in few bits, and the optimiser's kernel against its definition."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import precision_kernels as pk
from precision_kernels.reference.master import tie_bytes
from tests.edge_cases import assert_same_bits, generator, normal
from tests.kernels.triton_cases import DEVICE, GPU

REFERENCE = importlib.import_module("precision_kernels.reference.adamw")
TRITON = importlib.import_module("precision_kernels.triton.adamw")
MASTERS = {"fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "split": (torch.bfloat16, True)}
ELEMENTS = (0, 1, 7, 127, 128, 130, 1024, 2500, *((1 << 20, (1 << 20) + 8) if GPU else ()))


def as_floats(bits: torch.Tensor) -> torch.Tensor:
    """int64 numbers modulo 2^32 as the fp32 numbers of these bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def every_high_half() -> torch.Tensor:
    """fp32 numbers with all 65 536 upper halves, each with the lower halves around a tie and at both ends."""
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    return as_floats(((torch.arange(1 << 16) << 16)[:, None] + low).reshape(-1))


def assert_splits_exactly(values: torch.Tensor) -> None:
    """The high half is the BF16 rounding, and both together are the number, bit for bit."""
    high, low_half = pk.split_float32(values)
    assert_same_bits(high, values.to(torch.bfloat16))
    assert (low_half.low.dtype, low_half.low.shape) == (torch.int16, values.shape)
    assert (low_half.ties.dtype, low_half.ties.numel()) == (torch.uint8, tie_bytes(values.numel()))
    joined = pk.join_float32(high, low_half)
    assert_same_bits(joined, values)


def test_every_finite_number_and_infinity_is_two_halves() -> None:
    """Zeros of both signs, subnormals, ties to both sides and numbers that round to infinity survive the round trip."""
    values = every_high_half()
    assert_splits_exactly(values)
    finite = values[~values.isnan()]
    assert torch.equal(pk.join_float32(*pk.split_float32(finite)).view(torch.int32), finite.view(torch.int32))
    assert_splits_exactly(torch.tensor(3.4028234663852886e38))
    assert_splits_exactly(torch.empty(0, 4))
    assert_splits_exactly(normal(3, 5).t())


@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_random_bits_are_two_halves(start: int, count: int) -> None:
    """Any run of fp32 bit patterns, of any length."""
    assert_splits_exactly(as_floats((start + torch.arange(count) * 40503) % (1 << 32)))


def test_sixteen_bits_alone_could_not_tell() -> None:
    """65 537 fp32 numbers round to 1.0 in BF16: why there is a bit for ties."""
    around = as_floats(torch.arange(0x3F7F7000, 0x3F809000))
    one = around[around.to(torch.bfloat16) == 1.0]
    assert len(one) == 65537
    assert_splits_exactly(one)


def test_split_refuses_other_dtypes() -> None:
    """Only FP32 has these two halves."""
    with pytest.raises(ValueError, match=r"must be float32, got torch\.float64"):
        pk.split_float32(torch.zeros(2, dtype=torch.float64))


class Held:
    """A weight and its moments in some formats, and its updates."""

    def __init__(self, weight: torch.Tensor, master: str, moments: str, implementation=REFERENCE) -> None:
        dtype, split = MASTERS[master]
        self.low_half = None
        self.weight = weight.to(dtype)
        if split:
            self.weight, self.low_half = pk.split_float32(weight)
        self.moments = [pk.empty_moment(weight.shape, moments, square) for square in (False, True)]
        self.steps, self.adamw = 0, implementation.adamw

    def to(self, device: str) -> Held:
        self.weight = self.weight.to(device)
        if self.low_half is not None:
            self.low_half = pk.LowHalf(*(t.to(device) for t in self.low_half))
        self.moments = [
            m._replace(values=m.values.to(device), scales=None if m.scales is None else m.scales.to(device))
            for m in self.moments
        ]
        return self

    def update(self, gradient: torch.Tensor, scale: float = 1.0, lr: float = 1e-2) -> None:
        self.steps += 1
        step = pk.AdamWStep.of(self.steps, lr, (0.9, 0.99), 1e-8, 0.1, 3, scale)
        self.adamw(self.weight, self.low_half, gradient.to(self.weight.device), *self.moments, step)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"weight": self.weight}
        found |= {} if self.low_half is None else self.low_half._asdict()
        for name, moment in zip(("mean", "square"), self.moments, strict=True):
            found[name] = moment.values
            found |= {} if moment.scales is None else {f"{name} scales": moment.scales}
        return found


def wild_gradients(elements: int, seed: int) -> torch.Tensor:
    """Twenty orders of magnitude, some zeros, and sizes whose square is infinite or zero."""
    size = 10.0 ** torch.randint(-18, 3, (elements,), generator=generator(seed)).float()
    gradient = torch.randn(elements, generator=generator(seed + 1)) * size
    gradient[:: 7 + seed] = 0.0
    if elements > 20:
        gradient[3], gradient[11] = 1e-30, 3e18
    return gradient


@pytest.mark.parametrize("moments", pk.MOMENT_FORMATS)
@pytest.mark.parametrize("master", MASTERS)
def test_the_kernel_is_the_definition(master: str, moments: str) -> None:
    """Weights, both halves, ties, codes and scales are equal bit for bit after each of three updates."""
    for elements in ELEMENTS:
        weight = normal(1, elements)[0] if elements else torch.empty(0)
        expected = Held(weight, master, moments)
        actual = Held(weight, master, moments, TRITON).to(DEVICE)
        for seed in range(3):
            gradient = wild_gradients(elements, seed)
            expected.update(gradient, scale=0.7)
            actual.update(gradient, scale=0.7)
            theirs = actual.tensors()
            for name, tensor in expected.tensors().items():
                assert_same_bits(theirs[name], tensor, f"{name} of {elements}, update {seed + 1}")


@pytest.mark.parametrize("moments", pk.MOMENT_FORMATS)
def test_split_weights_are_the_fp32_ones(moments: str) -> None:
    """Over fifty updates the joined halves are the FP32 masters and the high half their BF16 rounding, in every bit."""
    start = torch.cat([normal(1, 3000)[0], every_high_half()[::37]])
    start = start[start.abs() < 1e30]
    whole, split = Held(start, "fp32", moments), Held(start, "split", moments)
    for seed in range(50):
        gradient = normal(1, len(start), seed=seed)[0]
        whole.update(gradient, lr=10.0 ** -(seed % 5))
        split.update(gradient, lr=10.0 ** -(seed % 5))
        assert_same_bits(pk.join_float32(split.weight, split.low_half), whole.weight, f"update {seed}")
        assert_same_bits(split.weight, whole.weight.to(torch.bfloat16))


def test_fp32_updates_are_torchs() -> None:
    """FP32 weights and moments follow torch.optim.AdamW to fp32 rounding."""
    ours, theirs = Held(normal(7, 5), "fp32", "float32"), torch.nn.Parameter(normal(7, 5))
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for seed in range(20):
        theirs.grad = normal(7, 5, seed=seed)
        optimizer.step()
        ours.update(theirs.grad)
    torch.testing.assert_close(ours.weight, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("moments", "bound"), [("bfloat16_stochastic", 0.02), ("blockwise_8bit", 0.05)])
def test_narrow_moments_do_not_stall(moments: str, bound: float) -> None:
    """After 2000 updates by gradients of size 1 the mean second moment is 1; to nearest, BF16 stays at 0.8."""
    held = Held(torch.zeros(1024), "fp32", moments)
    for seed in range(2000):
        held.update(torch.where(torch.rand(1024, generator=generator(seed)) < 0.5, -1.0, 1.0), lr=0.0)
    mean, square = (pk.load_moment(m) for m in held.moments)
    assert abs(square.mean().item() - 1.0) < bound
    assert abs(mean.mean().item()) < bound
    nearest = Held(torch.zeros(1), "fp32", "bfloat16")
    for _ in range(2000):
        nearest.update(torch.ones(1), lr=0.0)
    assert pk.load_moment(nearest.moments[1]).item() < 0.9


@pytest.mark.parametrize("moments", ["bfloat16_stochastic", "blockwise_8bit"])
@pytest.mark.parametrize("square", [False, True])
def test_rounding_is_right_on_average(moments: str, square: bool) -> None:
    """The mean over 4000 roundings is the value, to five standard errors, for sizes from 1 down to 2^-20."""
    values = 2.0 ** -torch.arange(0.0, 20.0, 0.17)
    values = values if square else values * torch.where(torch.arange(len(values)) % 2 == 0, 1.0, -1.0)
    total, squares, count = torch.zeros(len(values)).double(), torch.zeros(len(values)).double(), 4000
    moment = pk.empty_moment(values.shape, moments, square)
    for step in range(count):
        pk.store_moment(moment, values, pk.random_words(len(values), pk.random_keys(step, 1)))
        got = pk.load_moment(moment).double()
        total, squares = total + got, squares + got * got
    mean = total / count
    error = ((squares / count - mean * mean).clamp(min=0) / count).sqrt()
    assert ((mean - values).abs() <= 5 * error + values.abs() * 1e-5).all()


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1.0, 1e30, 3e38])
def test_second_moments_never_become_zero_by_rounding(size: float) -> None:
    """What is positive has a positive code beside a block's largest element, whatever the block's size; 0 stays 0."""
    values = torch.zeros(130)
    values[0], values[1:100], values[129] = size, size * 1e-7, size
    moment = pk.empty_moment(values.shape, "blockwise_8bit", True)
    for step in range(20):
        pk.store_moment(moment, values, pk.random_words(130, pk.random_keys(step, 0)))
        loaded = pk.load_moment(moment)
        assert loaded.isfinite().all()
        assert torch.equal(moment.values > 0, values > 0)
        assert torch.equal(loaded > 0, values > 0)


def test_random_words_depend_on_element_step_and_tensor() -> None:
    """Equal keys give equal words, others other ones; each of the 32 bits is set half of the time."""
    words = pk.random_words(1 << 16, pk.random_keys(5, 7))
    assert torch.equal(words, pk.random_words(1 << 16, pk.random_keys(5, 7)))
    assert torch.equal(words[:100], pk.random_words(100, pk.random_keys(5, 7)))
    for step, position in ((6, 7), (5, 8), (7, 5)):
        other = pk.random_words(1 << 16, pk.random_keys(step, position))
        assert (other == words).sum() < 5
        agreeing = (((other ^ words)[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert ((agreeing - 0.5).abs() < 0.012).all()
    share = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
    assert ((share - 0.5).abs() < 0.012).all()


def test_what_does_not_fit_is_listed() -> None:
    """One error names every shape, format and layout that is wrong."""
    mean, square = (pk.empty_moment((3,), "float32", s) for s in (False, True))
    step = pk.AdamWStep.of(1, 0.1, (0.9, 0.99), 1e-8, 0.0)
    with pytest.raises(ValueError, match=r"gradient has shape \(4,\).*a first and a second one.*contiguous"):
        pk.adamw(torch.zeros(6)[::2], None, torch.zeros(4), square, mean, step)
    _, low_half = pk.split_float32(torch.zeros(3))
    with pytest.raises(ValueError, match=r"must be bfloat16, got torch\.float32"):
        pk.adamw(torch.zeros(3), low_half, torch.zeros(3), mean, square, step)
    with pytest.raises(ValueError, match=r"format must be one of .* got 'int4'"):
        pk.empty_moment((3,), "int4", False)
