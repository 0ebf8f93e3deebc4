"""Shapes and values on which numerical code breaks, in one place: add a case here and every test sees it.

* `shapes`, `rows`, `dims`   sizes around the 128-block and of real models; a fast subset unless ``full``.
* `value_cases`              named matrices: zeros with a single one, 1e-20, infinities, NaN, ties between
  codes ...
* `layouts`                  the same numbers behind other strides and offsets.
* `row_contexts`             a row alone and inside batches, for row-invariance.
* `assert_same_bits`         bitwise equality with a report of the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

FAST_ROWS = (0, 1, 2, 3, 5, 127, 128, 129)
FULL_ROWS = (*FAST_ROWS, 8192)
FAST_DIMS = (1, 64, 128, 192, 576)
FULL_DIMS = (*FAST_DIMS, 4304, 10944)
"""4304 and 10944 are FFN widths of real models (SigLIP, DeepSeek-V2-Lite): not multiples of 128."""


def rows(full: bool = False) -> tuple[int, ...]:
    """Row counts: none, few, and around one block; with ``full`` a training batch too."""
    return FULL_ROWS if full else FAST_ROWS


def dims(full: bool = False) -> tuple[int, ...]:
    """Feature counts: multiples of 128 and ragged ones."""
    return FULL_DIMS if full else FAST_DIMS


def shapes(full: bool = False) -> list[tuple[int, int]]:
    """(rows, dim) pairs: every row count with a ragged dim, every dim with ragged rows; ``full``: the
    product.
    """
    if full:
        return [(r, d) for r in FULL_ROWS for d in FULL_DIMS]
    return sorted({(r, 192) for r in FAST_ROWS} | {(129, d) for d in FAST_DIMS} | {(3, 4304)})


def generator(seed: int) -> torch.Generator:
    """A seeded CPU generator."""
    return torch.Generator().manual_seed(seed)


def normal(rows: int, dim: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    """Standard normal fp32 [rows, dim]."""
    return torch.randn(rows, dim, generator=generator(seed)) * std


def finite_codes() -> torch.Tensor:
    """All 253 distinct finite e4m3 numbers as fp32, ascending."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[torch.isfinite(codes)].unique()


def _single_one(x: torch.Tensor) -> torch.Tensor:
    x.zero_()
    if x.numel():
        x.view(-1)[x.numel() // 2] = 1.0
    return x


def _sprinkle(x: torch.Tensor, *values: float) -> torch.Tensor:
    flat = x.view(-1)
    for i, value in enumerate(values):
        flat[i * 131 % max(1, flat.numel()) :: 997] = value
    return x


def _ties(x: torch.Tensor) -> torch.Tensor:
    """Midpoints between neighbouring codes and their fp32 neighbours; every 64th element is 448, so scales
    are 1.
    """
    codes = finite_codes()
    middle = (codes[1:] + codes[:-1]) / 2
    ladder = torch.cat((middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)))
    x.view(-1).copy_(ladder.repeat(x.numel() // len(ladder) + 1)[: x.numel()])
    x[:, ::64] = 448.0
    return x


def _code_boundary(x: torch.Tensor) -> torch.Tensor:
    """Row maxima of exactly 448 * 2^k and one fp32 step to either side; other elements are codes times 2^k."""
    codes = finite_codes()
    x.view(-1).copy_(codes.repeat(x.numel() // len(codes) + 1)[: x.numel()])
    top = torch.tensor(448.0)
    steps = (top, torch.nextafter(top, top + 1), torch.nextafter(top, top - 1))
    for i in range(x.shape[0]):
        x[i, ::128] = steps[i % 3]
        x[i] *= 2.0 ** (i % 40 - 20)
    return x


def _wide(x: torch.Tensor) -> torch.Tensor:
    exponents = torch.randint(-30, 30, x.shape, generator=generator(7))
    return x * torch.pow(2.0, exponents.float())


_MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "zeros": torch.zero_,
    "zeros with a single one": _single_one,
    "1e-20": lambda x: x.mul_(1e-20),
    "subnormal": lambda x: x.mul_(1e-39),
    "huge": lambda x: x.clamp_(-3, 3).mul_(1e38),
    "outlier per block": lambda x: x.index_fill_(1, torch.arange(0, x.shape[1], 128), 3e4),
    "60 binary orders of magnitude": _wide,
    "ties between codes": _ties,
    "maximum on a code boundary": _code_boundary,
    "negative zeros": lambda x: x.zero_().neg_(),
    "infinities": lambda x: _sprinkle(x, float("inf"), float("-inf")),
    "only infinities": lambda x: x.fill_(float("-inf")),
    "NaN": lambda x: _sprinkle(x, float("nan")),
    "NaN and infinities": lambda x: _sprinkle(x, float("nan"), float("inf")),
}

VALUE_CASES = tuple(_MAKERS)
FINITE_VALUE_CASES = tuple(name for name in _MAKERS if "inf" not in name and "NaN" not in name)


def value_case(
    name: str, rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """The matrix [rows, dim] of case ``name`` (one of `VALUE_CASES`) in ``dtype``."""
    x = _MAKERS[name](normal(rows, dim, seed))
    if name in FINITE_VALUE_CASES:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def value_cases(
    rows: int, dim: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, matrix) for every case."""
    for name in VALUE_CASES:
        yield name, value_case(name, rows, dim, dtype)


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) with the values of x [M, K] behind other strides and storage offsets."""
    m, k = x.shape
    yield "contiguous", x.contiguous()
    yield "transposed storage", x.t().contiguous().t()
    spread = x.new_full((m, 2 * k + 1), 77.0)
    spread[:, 1::2] = x
    yield "every second column", spread[:, 1::2]
    padded = x.new_full((m + 3, k + 5), float("nan"))
    padded[1 : m + 1, 3 : k + 3] = x
    yield "inside a larger matrix", padded[1 : m + 1, 3 : k + 3]
    yield (
        "every third row",
        x.new_zeros(max(1, 3 * m), k).index_copy_(0, 3 * torch.arange(m, device=x.device), x)[::3][:m],
    )


def cancelling(rows: int, dim: int, dtype: torch.dtype, seed: int = 0, noise: float = 1e-7) -> torch.Tensor:
    """[rows, dim] whose second half of every 128-block is minus the first, up to ``noise``, over 30 binary
    orders.

    Against a `mirrored` operand all leading digits cancel, so a sum that rounds anywhere shows it in the
    result.
    """
    x = normal(rows, dim, seed) * torch.pow(
        2.0, torch.randint(-15, 15, (rows, dim), generator=generator(seed)).float()
    )
    for start in range(0, dim - 127, 128):
        x[:, start + 64 : start + 128] = -x[:, start : start + 64] * (1 + noise * normal(rows, 64, seed + 1))
    return x.to(dtype)


def mirrored(rows: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal [rows, dim] whose second half of every 128-block repeats the first: the partner of `cancelling`."""
    x = normal(rows, dim, seed)
    for start in range(0, dim - 127, 128):
        x[:, start + 64 : start + 128] = x[:, start : start + 64]
    return x.to(dtype)


def row_contexts(row: torch.Tensor, seed: int = 5) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(name, batch [M, K], index) with row [K] at ``index``: alone, first, last, between, among NaN rows."""
    k = row.shape[0]
    yield "alone", row[None].clone(), 0
    for count, index in ((2, 1), (7, 3), (128, 0), (129, 128), (300, 191)):
        batch = normal(count, k, seed + count, std=3.0).to(row.dtype)
        batch[index] = row
        yield f"row {index} of {count}", batch, index
    loud = normal(5, k, seed, std=1e4).to(row.dtype)
    loud[0], loud[4], loud[2] = float("nan"), float("inf"), row
    yield "between NaN and infinite rows", loud, 2


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal dtype, shape and bits (NaN equals NaN of any payload); reports count and first differing element."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    different = actual.view(integers) != expected.view(integers)
    if actual.is_floating_point():
        wide = torch.float64 if actual.element_size() == 8 else torch.float32
        different &= ~(torch.isnan(actual.to(wide)) & torch.isnan(expected.to(wide)))
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {where}: "
            f"{actual[where].item()!r}, expected {expected[where].item()!r}"
        )
