"""Runs every Triton kernel once on ragged shapes, small enough for compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitise.py
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 python benchmarks/sanitise.py
"""

from __future__ import annotations

import torch

from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.triton import activation, attention, logprobs, matmul, norm, quantise, rotary


def main() -> None:
    for m, k in ((1, 64), (5, 300), (129, 192), (130, 576)):
        x, residual, weight = (torch.randn(*s, device="cuda").bfloat16() for s in ((m, k), (m, k), (k,)))
        rows, columns = quantise.quantise_both(x)
        w = quantise.quantise_weight(x, "ue8m0")
        for q in (rows, columns, w):
            quantise.dequantise(q, torch.bfloat16)
        matmul.block_fp8_matmul(rows, w)
        matmul.wgrad_fp8_matmul(columns, columns)
        matmul.invariant_matmul(x, residual)
        y, summed, rstd = norm.add_rms_norm(x, residual, weight, 1e-6)
        norm.rms_norm_backward(y, summed, weight, rstd, residual)
        norm.add_rms_norm_quantise(x, residual, weight, 1e-6)
        activation.silu_mul_quantise(x, residual)
        activation.silu_mul_backward(y, x, residual)
        q = x[:, : k // 4 * 4].reshape(m, 2, -1)
        table = torch.randn(8, q.shape[-1] // 2 * 2, device="cuda").bfloat16()
        rotary.rotary(q, q, torch.arange(m, device="cuda") % 8, table)
        ids = torch.zeros(m, dtype=torch.int64, device="cuda")
        logp, _, lse = logprobs.token_logprobs(x.float(), ids, 0.7, True)
        logprobs.token_logprobs_backward(logp, None, x.float(), ids, lse, None, 0.7)
    layout = AttentionLayout(torch.tensor([0, 1, 66, 196, 525], device="cuda"))
    for dim in attention.QUERIES:
        q, k = (torch.randn(525, heads, dim, device="cuda").bfloat16() for heads in (6, 2))
        attention.attention_backward(q, q, k, k, q, torch.zeros(6, 525, device="cuda").t(), layout)
    torch.cuda.synchronize()
    print("ran every kernel")


if __name__ == "__main__":
    main()
