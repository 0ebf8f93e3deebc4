"""Operators that are registered without the wrappers of `torch.library.custom_op` keep what those would ensure."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import Any

import pytest
import torch

import precision_kernels.triton
from precision_kernels.reference.formats import FP8
from precision_kernels.registration import fake, operator
from tests.counting import calls

M, K, H, D = 5, 256, 3, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def _codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=DEVICE).to(FP8)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


def _arguments() -> dict[str, tuple[Any, ...]]:
    """Of every operator, something that it takes."""
    rows, logits, ids = (False, 1e-10), torch.randn(M, 40, device=DEVICE), torch.arange(M, device=DEVICE)
    heads, cos_sin = (_bf16(M, H, D), _bf16(M, 1, D)), _bf16(M, D)
    queries, keys = (torch.randn(M, h, 64, dtype=torch.float16, device=DEVICE) for h in (2, 1))
    tiles = torch.tensor([[0, M, 0, 0]], dtype=torch.int32, device=DEVICE)
    halves = torch.randint(-9, 9, (M, K), dtype=torch.int16, device=DEVICE)
    ties = torch.full((M * K // 8,), 255, dtype=torch.uint8, device=DEVICE)
    moments = [torch.ones(M, K, dtype=t, device=DEVICE) for t in (torch.int8, torch.uint8)]
    return {
        "adamw": (
            _bf16(M, K), halves, ties, _ones(M, K), moments[0], _ones(M * 2), moments[1], _ones(M * 2), False,
            0.9, 0.1, 0.99, 0.01, 1.0, 1e-8, -0.5, 1.0, 1, 2,
        ),
        "add_scaled": (_bf16(M, K), _ones(M, K), 0.3),
        "attention_backward": (
            queries, queries.clone(), keys, keys.clone(), queries.clone(), _ones(2, M), tiles, tiles.clone(), 0.1,
        ),
        "quantise_rows": (_bf16(M, K), *rows),
        "quantise_columns": (_bf16(M, K), *rows),
        "quantise_both": (_bf16(M, K), *rows),
        "quantise_weight": (_bf16(M, K), *rows, True),
        "dequantise": (_codes(M, K), _ones(M, K // 128), 1, 128, torch.bfloat16),
        "rms_norm": (_bf16(M, K), _bf16(M, K), _bf16(K), 1e-6, True, True, *rows),
        "rms_norm_backward": (_bf16(M, K), _bf16(M, K), _bf16(K), _ones(M, 1), None),
        "rms_norm_quantise_columns": (_bf16(M, K), _bf16(K), _ones(M, 1), 1e-6, *rows),
        "norm_rotary": (*heads, _bf16(D), _bf16(D), 1e-6, ids, cos_sin),
        "rotary": (*heads, ids, cos_sin, 1.0),
        "rotary_and_copy": (*heads, _bf16(M, 1, D), ids, cos_sin, 1.0),
        "rotary_joint": (*heads, _bf16(M, 1, D), ids, cos_sin, -1.0),
        "silu_mul": (_bf16(M, K), _bf16(M, K), True, True, *rows),
        "silu_mul_saving": (_bf16(M, K), _bf16(M, K), *rows),
        "silu_mul_backward": (_bf16(M, K), _bf16(M, K), None, _bf16(M, K), None),
        "silu_mul_quantise_both": (_bf16(M, K), _bf16(M, K), *rows),
        "silu_mul_backward_quantise_both": (_bf16(M, K), _bf16(M, K), _bf16(M, K), *rows),
        "token_logprobs": (logits, ids, 1.0, True),
        "token_logprobs_backward": (_ones(M), None, logits, ids, _ones(M), None, 1.0),
        "log_softmax": (logits, 0.7),
        "log_softmax_backward": (_ones(M, 40), logits, 0.7),
        "block_fp8_gemm": (
            _codes(M, K), _ones(M, 2), _codes(128, K), _ones(1, 2), _ones(M, 128), 128, True,
        ),
        "invariant_gemm": (_bf16(M, K), _bf16(64, K), torch.float32),
    }  # fmt: skip


def _registered() -> dict[str, Any]:
    """Name -> operator, of all modules with Triton kernels."""
    folder = precision_kernels.triton
    modules = [
        importlib.import_module(f"{folder.__name__}.{m.name}") for m in pkgutil.iter_modules(folder.__path__)
    ]
    found = (v for module in modules for v in vars(module).values() if isinstance(v, torch._ops.OpOverload))
    return {
        op.name().removeprefix("precision_kernels::"): op
        for op in found
        if op.namespace == "precision_kernels"
    }


@pytest.mark.slow
def test_every_operator_does_what_its_schema_says() -> None:
    """Results are new tensors, only what the schema names is written to, and the shapes, dtypes and strides told to
    torch.compile are those of the results."""
    registered, arguments = _registered(), _arguments()
    assert set(registered) == set(arguments)
    for name, op in registered.items():
        given = arguments[name]
        named = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
        assert _written(op, given) == [i for i, written in enumerate(named) if written], name
        torch.library.opcheck(op, given, test_utils="test_faketensor")


def _written(op: Any, arguments: tuple[Any, ...]) -> list[int]:
    """Which arguments a call changes; its results may not share memory with any."""
    tensors = {i: a for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)}
    before = {i: t.view(torch.uint8).clone() for i, t in tensors.items()}
    results = op(*arguments)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    storages = [t.untyped_storage().data_ptr() for t in (*results, *tensors.values()) if t.numel()]
    assert len(set(storages)) == len(storages), op
    return [i for i, t in tensors.items() if not torch.equal(t.view(torch.uint8), before[i])]


def test_operators_compile_without_breaks_and_keep_their_bits() -> None:
    """One graph of a norm that quantises and a GEMM that adds into a tensor; eager's bits, also in that tensor."""
    ops, arguments = _registered(), _arguments()
    x, residual, weight = _bf16(M, K), _bf16(M, K), _bf16(K)
    b, b_scales = arguments["block_fp8_gemm"][2:4]

    def chain(out: torch.Tensor) -> torch.Tensor:
        _, summed, _, codes, scales = ops["rms_norm"](x, residual, weight, 1e-6, False, True, False, 1e-10)
        ops["block_fp8_gemm"](codes, scales, b, b_scales, out, 128, True)
        return summed

    eager, compiled = _ones(M, 128), _ones(M, 128)
    summed = torch.compile(chain, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(chain(eager), summed)
    assert torch.equal(eager, compiled)


def test_autograd_sees_what_an_operator_writes_to() -> None:
    """A tensor saved for a backward and written to afterwards is an error, not a wrong gradient."""
    arguments = _arguments()["block_fp8_gemm"]
    out, p = arguments[4], _ones(M, 128).requires_grad_()
    product = (p * out).sum()
    _registered()["block_fp8_gemm"](*arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():  # tensors without a counter
        _registered()["block_fp8_gemm"](*arguments[:4], _ones(M, 128), *arguments[5:])


def test_an_operator_that_is_to_be_differentiated_raises() -> None:
    """Operators have no gradient of their own: an error in the forward, compiled too, whatever warnings are shown."""
    gemm, x, w = _registered()["invariant_gemm"], _bf16(M, K).requires_grad_(), _bf16(64, K)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (gemm, torch.compile(lambda *a: gemm(*a), fullgraph=True, backend="aot_eager")):
            with pytest.raises(RuntimeError, match="precision_kernels::invariant_gemm has no gradient"):
                call(x, w, torch.float32).sum().backward()
    with torch.no_grad():
        expected = gemm(x, w, torch.float32)
    assert torch.equal(gemm(x.detach(), w, torch.float32), expected)


def test_shapes_are_told_for_the_parameters_of_the_operator() -> None:
    """A function of shapes that names other parameters, or in another order, is refused when it is registered."""
    ours = operator("test_registration_named")(_named)
    for wrong in (lambda x, w: x, lambda w, x, eps: x, lambda x, weight, eps: x):
        with pytest.raises(TypeError, match=r"the operator takes \['x', 'w', 'eps'\]"):
            fake(ours)(wrong)
    fake(ours)(lambda x, w, eps: x.new_empty(1))


def _named(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(1)


def test_a_call_takes_fewer_steps_than_a_custom_op() -> None:
    """Around a body that does nothing but make a tensor, the dispatcher calls less than half the functions of
    custom_op."""

    def body(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty(1)

    ours = operator("test_registration_body")(body)
    fake(ours)(lambda x, w, eps: x.new_empty(1))
    theirs = torch.library.custom_op("test_registration::body", body, mutates_args=())
    arguments = torch.ones(2), torch.ones(2), 1e-6
    with torch.no_grad():
        for call in (body, ours, theirs):
            call(*arguments)  # what happens once
        bare, light, heavy = (calls(lambda c=call: c(*arguments)) for call in (body, ours, theirs))
    assert bare < light
    assert light - bare < (heavy - bare) / 2
