"""The list of a run's matrix products is complete: what a real iteration multiplies is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from precision_kernels import dispatch
from rllib_llm.warming.products import Product, products_of

Make = Callable[..., Any]
Call = tuple[str, int, int, int, str]
"""operator, N, K, rows (tokens of a weight gradient), dtype of the result"""

ADAPTER = {"rank": 8, "alpha": 16}
EXEMPT = {"extends": "unified-fp8", "exempt": {"modules": ["**.o_proj"], "first_layers": 1}}
CASES = {
    "unified-fp8": ("unified-fp8", {}),
    "bf16": ("bf16", {}),
    "mixed-bf16-fp8": ("mixed-bf16-fp8", {}),
    "exempt modules": (EXEMPT, {}),
    "adapters": ("unified-fp8", {"adapter": ADAPTER}),
}


def seen_in(calls: set[Call]) -> dispatch.Observer:
    """An observer that notes the products that a list has to hold."""
    weights = {"block_fp8_matmul": 1, "dgrad_fp8_matmul": 1, "invariant_matmul": 1}

    def observe(operator: str, _: Any, arguments: tuple[Any, ...], result: Any) -> None:
        dtype = str(getattr(result, "dtype", "")).removeprefix("torch.")
        if operator in weights:
            n, k = arguments[1].shape
            calls.add((operator, n, k, arguments[0].shape[0], dtype))
        elif operator == "wgrad_fp8_matmul":
            dy, x = arguments[:2]
            calls.add((operator, dy.shape[1], x.shape[1], dy.shape[0], dtype))

    return observe


def holds(product: Product, call: Call) -> bool:
    """Whether a product of the list is that of a call."""
    operator, n, k, rows, result = call
    return (product.operator, product.outputs, product.inputs, product.result) == (
        operator,
        n,
        k,
        result,
    ) and rows <= product.most


@pytest.mark.parametrize("case", CASES)
def test_every_product_of_an_iteration_is_listed(build: Make, toy_config: Make, case: str) -> None:
    """Sampling, log-probs, forward and backward multiply nothing that the list does not name with as many rows; and the
    list names no operator and shape that an iteration does not have."""
    policy, model = CASES[case]
    config = toy_config(policy, max_prompt_tokens=24)
    if model:
        config = config.model(config.settings().model.path, **model)
    algo = build(config.training(micro_batch_tokens=40))
    calls: set[Call] = set()
    with dispatch.observed(seen_in(calls)):
        algo.train()
        algo.train()
    listed = products_of(config.settings())
    missing = {call for call in calls if not any(holds(product, call) for product in listed)}
    assert not missing
    assert {(p.operator, p.outputs, p.inputs) for p in listed} == {call[:3] for call in calls}
