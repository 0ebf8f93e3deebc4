"""One number of rows per class meets every kernel: tested against DeepGEMM's rule, stated again for the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.warming.products import MOST_TOKENS, Product, row_classes
from tests.random_examples import examples
from tests.warming.deepgemm_rule import Call, kernel

KINDS = (("1d2d", 2), ("1d1d", 4), ("bf16", 2), ("bf16", 4))
WIDTHS = st.integers(1, 400).map(lambda n: 64 * n)
DEPTHS = st.integers(1, 120).map(lambda n: 128 * n)


def class_of(rows: int) -> int:
    """The number that `row_classes` has for these rows: the smallest that is not below them."""
    return next(n for n in (16, 32) if n >= rows) if rows <= 32 else -(-rows // 64) * 64


@given(st.sampled_from(KINDS), st.integers(1, 20000), WIDTHS, DEPTHS)
@examples(400)
def test_rows_of_one_class_take_one_kernel(kind: tuple[str, int], rows: int, n: int, k: int) -> None:
    """Any number of rows takes the kernel of its class, and its class is among those up to a limit that allows it."""
    name, size = kind
    assert kernel(Call(name, rows, n, k, size)) == kernel(Call(name, class_of(rows), n, k, size))
    assert class_of(rows) in map(class_of, row_classes(rows))
    assert class_of(rows) in row_classes(rows + 64)


@pytest.mark.parametrize("most", [1, 2, 16, 17, 20, 32, 33, 63, 64, 65, 128, 441, 8192, 8193])
def test_no_class_beyond_the_limit(most: int) -> None:
    """The largest class holds the limit, and the one below does not."""
    classes = row_classes(most)
    assert classes == sorted(set(classes))
    assert classes[-1] >= most
    assert all(n < most for n in classes[:-1])


@given(st.integers(1, MOST_TOKENS))
def test_tokens_of_a_weight_gradient_are_padded_to_a_class(tokens: int) -> None:
    """A contraction of whole blocks of 128 tokens is in the list, up to more than any micro-batch has."""
    assert -(-tokens // 128) * 128 in Product("wgrad_fp8_matmul", 128, 128, "", "", tokens).rows()


SHAPES = [
    (n, k) for n in (64, 128, 256, 512, 1024, 2560, 4096, 6144, 24576) for k in (128, 1024, 4096, 12288)
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_more_rows_than_are_asked_for_take_no_other_kernel(n: int, k: int) -> None:
    """Four times the bound on rows, in steps of a tile (of more for narrow weights): each kernel is one of those
    below."""
    for operator, name, size in (
        ("block_fp8_matmul", "1d2d", 2),
        ("invariant_matmul", "bf16", 2),
        ("invariant_matmul", "bf16", 4),
    ):
        product = Product(operator, n, k, "", "", 10**9)
        asked = product.rows() if n >= 1024 else _sparse(product.rows())
        known = {kernel(Call(name, rows, n, k, size)) for rows in asked}
        step = max(64, asked[-1] // 256 // 64 * 64)
        beyond = {kernel(Call(name, m, n, k, size)) for m in range(asked[-1] + step, 4 * asked[-1], step)}
        assert beyond <= known


def _sparse(rows: list[int]) -> list[int]:
    """Every row class up to 65 536, then one in sixteen: a million rows of a weight of 64 columns take long to ask."""
    return [n for i, n in enumerate(rows) if n <= 1 << 16 or i % 16 == 0 or i == len(rows) - 1]
