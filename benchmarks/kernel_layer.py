"""One decoder layer of Llama-3.1-8B's shape, 8192 tokens, forward and backward: FP8 linears against BF16 linears.

Norms, rotary, SiLU and attention are the same operators on both sides; only the four linears differ, and what the
backward keeps (``saved="fp8"``: 128x1 codes of each linear's input, 1x128 codes of gate and up).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from precision_kernels import (
    LinearFormats,
    add_rms_norm,
    attention,
    linear,
    prepare_weight,
    rotary,
    rotary_cos_sin,
    silu_mul,
)
from precision_kernels.reference.layout import AttentionLayout

TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 8192, 4096, 32, 8, 128, 14336
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
FP8 = LinearFormats("fp8", "fp8", "fp8", "fp8")


class Layer:
    """A decoder layer as a function of (x, residual); ``formats`` None means torch BF16 linears."""

    def __init__(self, formats: LinearFormats | None) -> None:
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        dtype = torch.bfloat16 if formats is None else torch.float32
        self.weights = {n: (0.02 * make(*s)).to(dtype).requires_grad_() for n, s in SHAPES.items()}
        self.norms = [make(HIDDEN).requires_grad_() for _ in range(2)]
        self.formats = formats
        self.prepared: dict = {}
        if formats is not None:
            self.prepare()
        inv_freq = 5e5 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
        self.table = rotary_cos_sin(inv_freq, 2048, torch.bfloat16)
        self.positions = torch.arange(TOKENS, device="cuda") % 2048
        self.layout = AttentionLayout(torch.arange(0, TOKENS + 1, 2048, device="cuda"))

    def prepare(self) -> None:
        """Quantise the weights: once per optimiser step."""
        self.prepared = {n: prepare_weight(w, self.formats, torch.bfloat16) for n, w in self.weights.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.formats is None:
            return F.linear(x, self.weights[name])
        return linear(x, self.weights[name], None, self.formats, self.prepared[name])

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = add_rms_norm(x, residual, self.norms[0], 1e-6)
        q, k, v = self.linear("qkv", h).view(TOKENS, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotary(q, k, self.positions, self.table)
        h = self.linear("o", attention(q, k, v, self.layout).view(TOKENS, -1))
        h, residual = add_rms_norm(h, residual, self.norms[1], 1e-6)
        gate, up = self.linear("gate_up", h).chunk(2, -1)
        h = silu_mul(gate, up, "bf16" if self.formats is None else self.formats.saved)
        return self.linear("down", h), residual

    def parameters(self) -> list[torch.Tensor]:
        return [*self.weights.values(), *self.norms]


def compare(bench) -> None:
    """Rows: forward, forward + backward, memory held between them, weight quantisation, and the ratios."""
    x, residual = (torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dy = [torch.randn_like(x) for _ in range(2)]
    flops = 2 * TOKENS * sum(n * k for n, k in SHAPES.values()) + 4 * 2048**2 * HEAD_DIM * HEADS * 4 / 2
    results: dict[str, dict[str, float]] = {}
    for name, formats in (("BF16", None), ("FP8", FP8)):
        layer = Layer(formats)
        inputs = [t.detach().clone().requires_grad_() for t in (x, residual)]

        def step(layer=layer, inputs=inputs) -> None:
            for p in (*layer.parameters(), *inputs):
                p.grad = None
            torch.autograd.backward(layer(*inputs), dy)

        with torch.no_grad():
            forward = bench.time_eager(lambda layer=layer, inputs=inputs: layer(*inputs))
        both = bench.time_eager(step)
        for p in (*layer.parameters(), *inputs):
            p.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        outputs = layer(*inputs)
        held = torch.cuda.memory_allocated() - before
        del outputs
        results[name] = {"forward": forward, "both": both, "held": held}
        bench.record("decoder layer, 8192 tokens", f"{name} forward", forward, flops=flops)
        bench.record(
            "decoder layer, 8192 tokens",
            f"{name} forward + backward",
            both,
            flops=3 * flops,
            activations_MB=round(held / 1e6),
        )
        if formats is not None:
            ms = bench.time_eager(layer.prepare)
            bench.record("decoder layer, 8192 tokens", "FP8 weights quantised, once per optimiser step", ms)
    b, f = results["BF16"], results["FP8"]
    bench.rows.append(
        {
            "section": "decoder layer, 8192 tokens",
            "name": "FP8 against BF16",
            "forward_ratio": round(b["forward"] / f["forward"], 3),
            "forward_backward_ratio": round(b["both"] / f["both"], 3),
            "activation_memory_saved": round(1 - f["held"] / b["held"], 3),
        }
    )
    print(bench.rows[-1], flush=True)
