"""One decoder layer of Llama-3.1-8B's shape, 8192 tokens, forward and backward: the learner's layer under FP8 policies
against the same layer under the BF16 policy, and against PyTorch's BF16 linears.

Norms, rotary, SiLU and attention are the same operators everywhere; only the linears differ, and what the backward
keeps. Under a policy the master weights and their gradients are FP32 and the operands are made once per optimiser step
(timed apart); PyTorch's linears have BF16 weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from precision_kernels import add_rms_norm, attention, rotary, rotary_cos_sin, silu_mul
from precision_kernels.reference.layout import AttentionLayout
from precision_policies import load_policy
from rllib_llm.models.architecture import Architecture
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.decoder import Context, DecoderLayer

SECTION = "decoder layer, 8192 tokens"
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


class TorchLayer(nn.Module):
    """The same layer with `torch.nn.functional.linear` in BF16; gate and up apart, so no gradient is copied."""

    def __init__(self) -> None:
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

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`."""
        h, residual = add_rms_norm(x, residual, self.norms[0], 1e-5)
        q, k, v = (
            F.linear(h, self.weights["qkv"]).view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        )
        q, k = rotary(q, k, self.shared.positions, self.shared.table)
        h = F.linear(attention(q, k, v, self.shared.layout).view(len(x), -1), self.weights["o"])
        h, residual = add_rms_norm(h, residual, self.norms[1], 1e-5)
        h = silu_mul(F.linear(h, self.weights["gate"]), F.linear(h, self.weights["up"]))
        return F.linear(h, self.weights["down"]), residual


def torch_layer() -> tuple[Layer, nn.Module]:
    """`TorchLayer` and its parameters."""
    layer = TorchLayer()
    return layer, layer


LAYERS: dict[str, Callable[[], tuple[Layer, nn.Module]]] = {
    "torch BF16": torch_layer,
    "policy bf16": lambda: learner_layer("bf16"),
    "policy unified-fp8": lambda: learner_layer("unified-fp8"),
    "policy unified-fp8, activation.saved fp8": lambda: learner_layer(SAVED),
}


def measure(bench, name: str) -> dict[str, float]:
    """Milliseconds of forward and of forward + backward, and the bytes that are held between them."""
    call, module = LAYERS[name]()
    inputs = [
        torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(2)
    ]
    dy = [torch.randn_like(t) for t in inputs]

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


def compare(bench) -> None:
    """Rows per layer of `LAYERS`, and the ratios of the FP8 ones to the BF16 ones.

    Every layer is measured twice, the second time in reverse order, for the clock falls while the GPU warms up.
    """
    linear = HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * FFN)
    flops = 2 * TOKENS * linear + 4 * LENGTH * TOKENS * HEAD_DIM * HEADS / 2
    passes = [{name: measure(bench, name) for name in order} for order in (LAYERS, reversed(LAYERS))]
    results = {name: {k: sum(p[name][k] for p in passes) / 2 for k in passes[0][name]} for name in LAYERS}
    for name, r in results.items():
        bench.record(SECTION, f"{name}: forward", r["forward"], flops=flops)
        held = {"activations_MB": round(r["held"] / 1e6)}
        bench.record(SECTION, f"{name}: forward + backward", r["both"], flops=3 * flops, **held)
    for name, base in ((n, b) for n in results if "fp8" in n for b in results if "fp8" not in b):
        fp8, bf16 = results[name], results[base]
        bench.rows.append(
            {
                "section": SECTION,
                "name": f"{name} against {base}",
                "forward_ratio": round(bf16["forward"] / fp8["forward"], 3),
                "forward_backward_ratio": round(bf16["both"] / fp8["both"], 3),
                "activation_memory_saved": round(1 - fp8["held"] / bf16["held"], 3),
            }
        )
        print(bench.rows[-1], flush=True)
