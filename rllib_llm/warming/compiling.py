"""Meeting the kernels of matrix products: DeepGEMM's entry points are called as a run calls them, on numbers of no use.

A worker process runs `compile_share` (`rllib_llm.warming.worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rllib_llm.warming.products import Product

__all__ = ["COMPILE_SHARE", "compile_share", "shares_of"]

COMPILE_SHARE = f"{__name__}:compile_share"
FEW_ROWS = 512
"""Where the rows of a product are cut into two shares. Most kernels are of few rows; by DeepGEMM's rule the two
parts of the shapes of Qwen3-8B have none in common, so 16 processes take half of the time (40 s instead of 76 for 134
kernels of 4 s, computed with `tests/warming/deepgemm_rule.py`)."""


def shares_of(products: Sequence[Product]) -> list[dict[str, Any]]:
    """The work for one process each, as plain data: a product and some of its rows; those with most kernels first."""
    few, many, gradients = [], [], []
    for product in products:
        rows = product.rows()
        if (
            product.operator == "wgrad_fp8_matmul"
        ):  # its rows are compiled in, its contraction is not: a kernel or two
            gradients.append((product, rows))
            continue
        few.append((product, [n for n in rows if n <= FEW_ROWS]))
        many.append((product, [n for n in rows if n > FEW_ROWS]))
    ordered = [*sorted(few, key=_fewest_columns), *sorted(many, key=_fewest_columns), *gradients]
    return [{"product": asdict(product), "rows": rows} for product, rows in ordered if rows]


def _fewest_columns(share: tuple[Product, list[int]]) -> int:
    product, _ = share
    return product.inputs if product.operator == "dgrad_fp8_matmul" else product.outputs


def compile_share(share: Mapping[str, Any]) -> Iterator[str]:
    """Call a product with each of its numbers of rows; yields what was met, one text per number."""
    product, rows = Product(**share["product"]), list(share["rows"])
    call = _CALLS[product.operator](product, max(rows))
    for count in rows:
        call(count)
        yield f"{product}, {count} rows"
    torch.cuda.synchronize()


def _random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=dtype, device="cuda")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# Each takes a product and its most rows, makes the operands once and returns what calls the product with some rows.


def _forward(product: Product, most: int) -> Callable[[int], object]:
    from precision_kernels.hopper import deepgemm
    from precision_kernels.triton import quantise

    x = _random(most, product.inputs)
    weight = quantise.quantise_weight(_random(product.outputs, product.inputs))
    result = _dtype(product.result)
    return lambda rows: deepgemm.block_fp8_matmul(quantise.quantise_activation(x[:rows]), weight, result)


def _input_gradient(product: Product, most: int) -> Callable[[int], object]:
    from precision_kernels.hopper import deepgemm
    from precision_kernels.triton import quantise

    dy = _random(most, product.outputs)
    weight = quantise.quantise_weight(_random(product.outputs, product.inputs))
    result = _dtype(product.result)
    return lambda rows: deepgemm.dgrad_fp8_matmul(quantise.quantise_activation(dy[:rows]), weight, result)


def _weight_gradient(product: Product, most: int) -> Callable[[int], object]:
    from precision_kernels.hopper import deepgemm
    from precision_kernels.triton import quantise

    dy, x = _random(most, product.outputs), _random(most, product.inputs)
    out = torch.zeros(product.outputs, product.inputs, dtype=torch.float32, device="cuda")

    def call(tokens: int) -> object:
        dy_columns, x_columns = quantise.quantise_columns(dy[:tokens]), quantise.quantise_columns(x[:tokens])
        return deepgemm.wgrad_fp8_matmul(dy_columns, x_columns, out)

    return call


def _invariant(product: Product, most: int) -> Callable[[int], object]:
    from precision_kernels.hopper import deepgemm

    dtype, result = _dtype(product.operands), _dtype(product.result)
    x = _random(most, product.inputs, dtype)
    weight = deepgemm.pack_weight(_random(product.outputs, product.inputs, dtype))
    return lambda rows: deepgemm.invariant_matmul(x[:rows], weight, result)


_CALLS: dict[str, Callable[[Product, int], Callable[[int], object]]] = {
    "block_fp8_matmul": _forward,
    "dgrad_fp8_matmul": _input_gradient,
    "wgrad_fp8_matmul": _weight_gradient,
    "invariant_matmul": _invariant,
}
