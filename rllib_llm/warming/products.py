"""The matrix products of a run: which there will be, from model, policy and limits, without a GPU and without weights.

DeepGEMM compiles a kernel when it first meets a configuration, 4 s each. Its heuristic chooses one from the weight's
shape, the formats and the number of rows; the shape is compiled in, rows are not. So a product here is what is fixed,
and `Product.rows` is one number of rows for each configuration that there may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from precision_policies import AdapterSpec, PrecisionPolicy
from precision_policies.adapters import adapter_formats
from rllib_llm.engines.factory import largest_step
from rllib_llm.models.causal_lm import LOGITS_CHUNK_ELEMENTS, CausalLM, build_model
from rllib_llm.models.checkpoint import load_config
from rllib_llm.models.decoder import DecoderLayer
from rllib_llm.models.layers import PlannedLinear, Side
from rllib_llm.models.paths import resolve_model_path

if TYPE_CHECKING:
    from rllib_llm.settings.groups import Settings

__all__ = ["Limits", "Product", "limits_of", "model_products", "products_of", "row_classes", "token_classes"]

TILE = 64
"""Rows of DeepGEMM's tiles on Hopper are 64, 128 or 256, and 16 or 32 where there are no more rows than that
(`SM90ArchSpec::get_layout_candidates` in csrc/jit_kernels/heuristics/sm90.hpp of deepseek-ai/DeepGEMM, 891d57b, which
vLLM bundles, and 54e2261). The rest of its choice reads rows only as the number of tiles, rounded up."""
BLOCK = 128
MOST_OUTPUTS = 1 << 26
"""Rows x columns of the largest result that is asked for. Its 4 000 tiles of 128 x 128 are thirty times as many as a
GPU has multiprocessors: how full the last round is, which is what makes the choice change with the rows, is then 3 %
at most. No configuration was first chosen above this in any shape of `tests/warming/test_rows.py`."""
FEWEST_ROWS = 1024
"""Asked for whatever the number of columns: steps of engines that decode."""
MOST_TOKENS = 1 << 16
"""Largest contraction of a weight gradient that is asked for, more than a micro-batch has. It enters the choice beside
the cost of writing the result: a gradient [320, 5440] of 17 920 tokens takes another kernel than of 8 192."""
_OPERANDS = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Limits:
    """Most tokens of one forward pass of the learner and of an engine, of one sequence, and most sequences that an
    engine decodes."""

    train_tokens: int
    engine_tokens: int
    engine_sequences: int
    longest: int


@dataclass(frozen=True, order=True)
class Product:
    """One of DeepGEMM's entry points with everything that a run fixes of its calls.

    operator: "block_fp8_matmul", "dgrad_fp8_matmul", "wgrad_fp8_matmul" or "invariant_matmul". outputs, inputs: N and K
    of the weight [N, K]. operands, result: torch's dtypes. most: rows, or tokens of a weight gradient.
    """

    operator: str
    outputs: int
    inputs: int
    operands: str
    result: str
    most: int

    def rows(self) -> list[int]:
        """Numbers of rows (of tokens, for a weight gradient) that meet every kernel of up to ``most``."""
        if self.operator == "wgrad_fp8_matmul":
            return token_classes(min(self.most, MOST_TOKENS))
        columns = self.inputs if self.operator == "dgrad_fp8_matmul" else self.outputs
        return row_classes(min(self.most, max(FEWEST_ROWS, MOST_OUTPUTS // columns)))

    def __str__(self) -> str:
        return (
            f"{self.operator} of a weight [{self.outputs}, {self.inputs}], {self.operands} to {self.result}"
        )


def row_classes(most: int) -> list[int]:
    """One number of rows of each class that DeepGEMM's choice distinguishes, up to the class of ``most``.

    Also 1 and 17: Triton, which runs the shapes that DeepGEMM refuses, compiles one row, multiples of 16 and others
    apart.
    """
    classes = [1, 16, 17, 32, *range(TILE, most + TILE, TILE)]
    return [n for i, n in enumerate(classes) if i == 0 or classes[i - 1] < most]


def token_classes(most: int) -> list[int]:
    """The same for the tokens of a weight gradient, which are padded to whole blocks of 128."""
    return [n for n in (1, 17) if n <= most] + list(range(BLOCK, most + BLOCK, BLOCK))


def products_of(settings: Settings) -> list[Product]:
    """The products of learner, engines and the frozen reference of a run, each once.

    Raises ModelPathError and ArchitectureError for a model that cannot be used.
    """
    llm, policy = settings.model, settings.policy
    assert llm.path is not None, "validate() requires a path"
    adapter = None if llm.adapter is None else llm.adapter.spec()
    config = load_config(resolve_model_path(llm.path))
    limits = limits_of(settings, config.max_position_embeddings)
    found = [*model_products(config, policy, limits, adapter)]
    if settings.train.kl_coeff and llm.reference_path not in (None, llm.path):
        assert llm.reference_path is not None
        reference = load_config(resolve_model_path(llm.reference_path))
        found += _side_products(_empty(reference, policy, "train", None), limits)
    return _merged(found)


def limits_of(settings: Settings, context: int) -> Limits:
    """What the settings bound. context: the model's longest sequence."""
    llm, rollout = settings.model, settings.rollout
    longest = min(context, llm.max_sequence_length or context)
    if rollout.max_turns == 1 and rollout.max_prompt_tokens is not None:
        longest = min(longest, rollout.max_prompt_tokens + rollout.max_new_tokens)
    step = largest_step(rollout.engine, rollout.engine_options)
    # A sequence that is longer than a micro-batch is one of its own.
    train = max(settings.train.micro_batch_tokens, longest)
    return Limits(train, max(step.tokens, step.sequences), step.sequences, longest)


def model_products(
    config: Any, policy: PrecisionPolicy, limits: Limits, adapter: AdapterSpec | None = None
) -> list[Product]:
    """The products of both sides of a model (a transformers config) under a policy."""
    sides: tuple[Side, ...] = ("train", "rollout")
    models = [_empty(config, policy, side, adapter) for side in sides]
    return _merged(product for lm in models for product in _side_products(lm, limits))


def _empty(config: Any, policy: PrecisionPolicy, side: Side, adapter: AdapterSpec | None) -> CausalLM:
    """The model's modules, which know what is one GEMM, without memory for their tensors."""
    with torch.device("meta"):
        return build_model(config, policy, side, adapter=adapter)


def _side_products(lm: CausalLM, limits: Limits) -> Iterator[Product]:
    most = limits.train_tokens if lm.side == "train" else limits.engine_tokens
    result = str(lm.compute_dtype).removeprefix("torch.")
    for layer in lm.model.layers:
        assert isinstance(layer, DecoderLayer)
        for group in (layer.self_attn.qkv, layer.mlp.gate_up):
            yield from _group(group.modules, group.joined, most, result)
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            yield from _group((module,), False, most, result)
    # Log-probs are made of chunks of rows; an engine samples one token of each sequence.
    chunk = max(1, LOGITS_CHUNK_ELEMENTS // lm.architecture.vocab)
    rows = min(most, chunk) if lm.side == "train" else limits.engine_sequences
    yield from _group((lm.lm_head,), False, rows, "float32", gradient=result)


def _group(
    modules: Sequence[PlannedLinear], joined: bool, most: int, result: str, gradient: str | None = None
) -> Iterator[Product]:
    """Of linears of one input. ``result``: of the forward; ``gradient``: of that input, if it is another dtype."""
    formats, trains = modules[0].formats, modules[0].side == "train"
    shapes = [(m.plan.shape[0], m.plan.shape[1]) for m in modules]
    if joined:
        shapes = [(sum(n for n, _ in shapes), shapes[0][1])]
    # Input gradients of several products are added in fp32.
    gradient = "float32" if len(shapes) > 1 else gradient or result
    for n, k in shapes:
        if formats.forward == "fp8":
            yield Product("block_fp8_matmul", n, k, _OPERANDS["fp8"], result, most)
        else:
            yield Product("invariant_matmul", n, k, _OPERANDS[formats.forward], result, most)
        if trains and formats.dgrad == "fp8":
            yield Product("dgrad_fp8_matmul", n, k, _OPERANDS["fp8"], gradient, most)
        if trains and formats.wgrad == "fp8" and not modules[0].frozen:
            yield Product("wgrad_fp8_matmul", n, k, _OPERANDS["fp8"], "float32", most)
    for module in modules:
        if module.adapter is not None:
            yield from _adapter(module, most)


def _adapter(module: PlannedLinear, most: int) -> Iterator[Product]:
    """The two products of a low-rank adapter's forward; those of its backward are cuBLAS's."""
    assert module.adapter is not None
    said = adapter_formats(module.policy)
    rank, inputs = module.adapter.a.plan.shape
    operands = _OPERANDS[said.weight]
    yield Product("invariant_matmul", rank, inputs, operands, _OPERANDS[said.inner], most)
    yield Product("invariant_matmul", module.plan.shape[0], rank, operands, "float32", most)


def _merged(products: Iterable[Product]) -> list[Product]:
    """Each product once, with the largest of its bounds."""
    most: dict[Product, int] = {}
    for product in products:
        key = dataclasses.replace(product, most=0)
        most[key] = max(most.get(key, 0), product.most)
    return sorted(dataclasses.replace(key, most=bound) for key, bound in most.items())
