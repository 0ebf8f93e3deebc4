"""One decoder layer of Llama-3.1-8B's shape, 8192 tokens, forward and backward: the learner's layer under FP8 policies
against the same layer under the BF16 policy, and against PyTorch's BF16 linears.

Norms, rotary, SiLU and attention are the same operators everywhere; only the linears differ, and what the backward
keeps. Under a policy the master weights and their gradients are FP32 and the operands are made once per optimiser step
(timed apart); PyTorch's linears have BF16 weights and gradients. Measured as the first micro-batch of an optimiser
step, which makes the gradients, and as the next one, which adds to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from precision_kernels import (
    accumulate_in_place,
    add_rms_norm,
    attention,
    rotary,
    rotary_cos_sin,
    silu_mul,
)
from precision_kernels.reference.layout import AttentionLayout
from precision_policies import load_policy
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.decoder import Context, DecoderLayer

SECTION = "decoder layer, 8192 tokens"
NEXT = f"{SECTION}, the next micro-batch: weight gradients are added"
TOKENS, LENGTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 8192, 2048, 4096, 32, 8, 128, 14336
DEVICE = "cuda"
SAVED = {
    "extends": "unified-fp8",
    "name": "unified-fp8-saved",
    "activation": {"saved": "fp8"},
}
Layer = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def config() -> dict:
    """Hugging Face's config of one such layer."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN,
        "vocab_size": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH, "rope_theta": 5e5,
        "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02,
    }  # fmt: skip


def context() -> Context:
    """Packed sequences of 2048 tokens."""
    starts = torch.arange(0, TOKENS + 1, LENGTH, device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE) % LENGTH
    inv_freq = 5e5 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    table = rotary_cos_sin(inv_freq, LENGTH, torch.bfloat16)
    return Context(PackedBatch(positions, positions, starts), table, AttentionLayout(starts))


def learner_layer(policy_source: str | dict) -> tuple[Layer, nn.Module]:
    """The learner's own `DecoderLayer` under a policy, with random master weights."""
    policy = load_policy(policy_source)
    layer = DecoderLayer(0, Architecture.from_config(config()), policy.resolve(config()), policy, "train")
    layer = layer.to(DEVICE)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(
                torch.ones_like(parameter) if "norm" in name else 0.02 * torch.randn_like(parameter)
            )
    shared = context()
    return lambda x, residual: layer(x, residual, shared), layer


class MainGradientLinear(torch.autograd.Function):
    """`F.linear` in BF16 whose weight gradient cuBLAS adds to an FP32 matrix [N, K]."""

    @staticmethod
    def forward(ctx, x, weight, main):
        ctx.save_for_backward(x, weight)
        ctx.main = main
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        torch.addmm(ctx.main, dy.t(), x, out_dtype=torch.float32, out=ctx.main)
        return dy @ weight, None, None


class TorchLayer(nn.Module):
    """The same layer with `torch.nn.functional.linear` in BF16; gate and up apart, so no gradient is copied.

    ``main_gradients``: weight gradients are added to FP32 matrices, as training with small micro-batches needs.
    """

    def __init__(self, main_gradients: bool = False) -> None:
        super().__init__()
        shapes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "o": (HIDDEN, HEADS * HEAD_DIM),
            "gate": (FFN, HIDDEN),
            "up": (FFN, HIDDEN),
            "down": (HIDDEN, FFN),
        }
        make = lambda *shape: nn.Parameter(0.02 * torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16))  # noqa: E731
        self.weights = nn.ParameterDict({name: make(*shape) for name, shape in shapes.items()})
        self.norms = nn.ParameterList([make(HIDDEN) for _ in range(2)])
        self.shared = context()
        self.main = {n: torch.zeros_like(w, dtype=torch.float32) for n, w in self.weights.items()}
        self.main = self.main if main_gradients else {}

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.main:
            return MainGradientLinear.apply(x, self.weights[name], self.main[name])
        return F.linear(x, self.weights[name])

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        h, residual = add_rms_norm(x, residual, self.norms[0], 1e-5)
        q, k, v = self._linear(h, "qkv").view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotary(q, k, self.shared.positions, self.shared.table)
        h = self._linear(attention(q, k, v, self.shared.layout).view(len(x), -1), "o")
        h, residual = add_rms_norm(h, residual, self.norms[1], 1e-5)
        h = silu_mul(self._linear(h, "gate"), self._linear(h, "up"))
        return self._linear(h, "down"), residual


def torch_layer(main_gradients: bool = False) -> tuple[Layer, nn.Module]:
    """`TorchLayer` and its parameters."""
    layer = TorchLayer(main_gradients)
    return layer, layer


LAYERS: dict[str, Callable[[], tuple[Layer, nn.Module]]] = {
    "torch BF16": torch_layer,
    "policy bf16": lambda: learner_layer("bf16"),
    "policy unified-fp8": lambda: learner_layer("unified-fp8"),
    "policy unified-fp8, activation.saved fp8": lambda: learner_layer(SAVED),
}


NEXT_LAYERS = {
    "torch BF16, BF16 gradients": torch_layer,
    "torch BF16, FP32 gradients": lambda: torch_layer(main_gradients=True),
    **{name: make for name, make in LAYERS.items() if name.startswith("policy")},
}


def _inputs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x and the residual stream, and the gradients of both results."""
    inputs = [
        torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(2)
    ]
    return inputs, [torch.randn_like(t) for t in inputs]


def measure(bench, name: str) -> dict[str, float]:
    """Milliseconds of forward and of forward + backward, and the bytes that are held between them."""
    call, module = LAYERS[name]()
    inputs, dy = _inputs()

    def clear() -> None:
        for p in (*module.parameters(), *inputs):
            p.grad = None

    def step() -> None:
        clear()
        torch.autograd.backward(call(*inputs), dy)

    with torch.no_grad():
        forward = bench.time_eager(lambda: call(*inputs))
    both = bench.time_eager(step)
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = call(*inputs)
    held = torch.cuda.memory_allocated() - before
    del outputs
    return {"forward": forward, "both": both, "held": held}


def measure_next(bench, name: str) -> dict[str, float]:
    """Milliseconds of forward + backward where every weight has a gradient already."""
    call, module = NEXT_LAYERS[name]()
    inputs, dy = _inputs()
    if name.startswith("policy"):
        accumulate_in_place(module.parameters())

    def step() -> None:
        for x in inputs:
            x.grad = None
        torch.autograd.backward(call(*inputs), dy)

    return {"both": bench.time_eager(step)}


def _twice(layers, measured) -> dict[str, dict[str, float]]:
    """Means of two passes, the second in reverse order, for the clock falls while the GPU warms up."""
    passes = [{name: measured(name) for name in order} for order in (layers, reversed(layers))]
    return {name: {k: sum(p[name][k] for p in passes) / 2 for k in passes[0][name]} for name in layers}


def _compare(bench, section: str, results: dict[str, dict[str, float]]) -> None:
    """Rows of the ratios of the FP8 layers to the BF16 ones."""
    for name, base in ((n, b) for n in results if "fp8" in n for b in results if "fp8" not in b):
        fp8, bf16 = results[name], results[base]
        row = {"section": section, "name": f"{name} against {base}"}
        if "forward" in fp8:
            row["forward_ratio"] = round(bf16["forward"] / fp8["forward"], 3)
        row["forward_backward_ratio"] = round(bf16["both"] / fp8["both"], 3)
        if "held" in fp8:
            row["activation_memory_saved"] = round(1 - fp8["held"] / bf16["held"], 3)
        bench.rows.append(row)
        print(row, flush=True)


def compare(bench) -> None:
    """Rows per layer of `LAYERS` and `NEXT_LAYERS`, and the ratios of the FP8 ones to the BF16 ones."""
    linear = HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * FFN)
    flops = 2 * TOKENS * linear + 4 * LENGTH * TOKENS * HEAD_DIM * HEADS / 2
    results = _twice(LAYERS, lambda name: measure(bench, name))
    for name, r in results.items():
        bench.record(SECTION, f"{name}: forward", r["forward"], flops=flops)
        held = {"activations_MB": round(r["held"] / 1e6)}
        bench.record(SECTION, f"{name}: forward + backward", r["both"], flops=3 * flops, **held)
    _compare(bench, SECTION, results)
    results = _twice(NEXT_LAYERS, lambda name: measure_next(bench, name))
    for name, r in results.items():
        bench.record(NEXT, f"{name}: forward + backward", r["both"], flops=3 * flops)
    _compare(bench, NEXT, results)
