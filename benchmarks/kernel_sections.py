# ruff: noqa: B023 (closures are timed within the iteration that makes them)
"""The sections of benchmarks/kernels.py: what is called, on which shapes, against what."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from precision_kernels import dispatch
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.triton import activation, activation_codes, logprobs, matmul, norm, quantise

TOKENS = 8192
MODELS = {
    "Llama-3.1-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "Qwen3-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
}
WEIGHTS = sorted({shape for shapes in MODELS.values() for shape in shapes.values()})
HEADS = ((128256, 4096), (151936, 4096))
FEW_ROWS = (1, 16, 64, 128, 256)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def op(name: str):
    """The implementation bound on CUDA."""
    return dispatch.implementation(name, "cuda")


def memory(bench) -> None:
    """Quantisers and their fusions: bytes read once and written once, against the copy bandwidth."""
    for d in (4096, 12288):
        n = TOKENS * d
        sets = 4 if d == 4096 else 2
        xs, rs = ([randn(TOKENS, d) for _ in range(sets)] for _ in range(2))
        w = randn(d)

        def go(name: str, call, per_element: float, d=d, n=n, xs=xs, rs=rs) -> None:
            ms = bench.time([lambda x=x, r=r: call(x, r) for x, r in zip(xs, rs, strict=True)])
            bench.record("memory-bound, 8192 rows", f"{name} x {d}", ms, bytes_=per_element * n)

        scale = 4 / 128
        go("torch copy of the input", lambda x, r: r.copy_(x), 4)
        go("quantise 1x128 fp32", lambda x, r: quantise.quantise_activation(x), 3 + scale)
        go("quantise 1x128 ue8m0", lambda x, r: quantise.quantise_activation(x, "ue8m0"), 3 + scale)
        go("quantise 128x1 transposed", lambda x, r: quantise.quantise_columns(x), 3 + scale)
        go("quantise both directions", lambda x, r: quantise.quantise_both(x), 4 + 2 * scale)
        go("quantise 128x128 + transposed copy", lambda x, r: quantise.quantise_weight(x), 4)
        go("rms_norm", lambda x, r: norm.rms_norm(x, w, 1e-6), 4)
        go("rms_norm + quantise", lambda x, r: norm.rms_norm_quantise(x, w, 1e-6), 3 + scale)
        go("add + rms_norm", lambda x, r: norm.add_rms_norm(x, r, w, 1e-6), 8)
        go("add + rms_norm + quantise", lambda x, r: norm.add_rms_norm_quantise(x, r, w, 1e-6), 7 + scale)
        rstd = norm.rms_norm(xs[0], w, 1e-6)[1]
        go("rms_norm backward", lambda x, r: norm.rms_norm_backward(x, r, w, rstd), 6)
        go("silu_mul", activation.silu_mul, 6)
        go("silu_mul + quantise", activation.silu_mul_quantise, 5 + scale)
        go("silu_mul backward", lambda x, r: activation.silu_mul_backward(x, r, x), 8)
        go("silu_mul, and codes of gate and up", activation.silu_mul_saving, 8 + 2 * scale)
        go("silu_mul + quantise both directions", activation_codes.silu_mul_quantise_both, 6 + 2 * scale)
        gradients = activation_codes.silu_mul_backward_quantise_both
        go("silu_mul backward + quantise both", lambda x, r: gradients(x, r, x), 8 + 4 * scale)
        codes = quantise.quantise_activation(xs[0])
        saved = activation.silu_mul_backward_saved
        go("silu_mul backward from codes", lambda x, r, q=codes: saved(r, q, q), 7 + scale)
        q = [x.view(TOKENS, -1, 128) for x in xs]
        ms = bench.time([lambda x=x: norm.rms_norm(x, w[:128], 1e-6) for x in q])
        bench.record("memory-bound, 8192 rows", f"q/k norm, {d // 128} heads of 128", ms, bytes_=4 * n)


def linear(bench) -> None:
    """The FP8 linear at 8192 rows: with its quantiser, alone, and behind a fused producer; BF16 in the same run."""
    for model, shapes in MODELS.items():
        for name, (n, k) in shapes.items():
            xs, w = [randn(TOKENS, k) for _ in range(3)], randn(n, k)
            b, flops = op("quantise_weight")(w), 2 * TOKENS * n * k
            codes = [op("quantise_activation")(x) for x in xs]
            bf16 = bench.time([lambda x=x: F.linear(x, w) for x in xs])
            alone = bench.time([lambda a=a: op("block_fp8_matmul")(a, b) for a in codes])
            both = bench.time(
                [lambda x=x: op("block_fp8_matmul")(op("quantise_activation")(x), b) for x in xs]
            )
            extra = {"bf16_ms": round(bf16, 4), "with_quantiser": round(bf16 / both, 3)}
            if name in ("qkv", "gate_up"):
                weight, r = randn(k), randn(TOKENS, k)
                plain = bench.time([lambda x=x: norm.add_rms_norm(x, r, weight, 1e-6) for x in xs])
                fused = bench.time([lambda x=x: norm.add_rms_norm_quantise(x, r, weight, 1e-6) for x in xs])
            elif name == "down":
                gates = [randn(TOKENS, 2 * k).chunk(2, -1) for _ in range(2)]
                plain = bench.time([lambda g=g: activation.silu_mul(*g) for g in gates])
                fused = bench.time([lambda g=g: activation.silu_mul_quantise(*g) for g in gates])
            if name != "o":
                extra |= {
                    "fused_producer": round(bf16 / (alone + max(0.0, fused - plain)), 3),
                    "producer_and_linear": round((plain + bf16) / (fused + alone), 3),
                }
            bench.record(
                "linear forward, 8192 rows",
                f"{model} {name} {n}x{k}",
                alone,
                flops=flops,
                **extra,
                gemm_alone=round(bf16 / alone, 3),
            )


def backward(bench) -> None:
    """dgrad and wgrad at 8192 rows against cuBLAS BF16 with a BF16 result; wgrad gives fp32, new or added."""
    for n, k in WEIGHTS:
        x, dy, w = randn(TOKENS, k), randn(TOKENS, n), randn(n, k)
        flops = 2 * TOKENS * n * k
        d, dc = op("quantise_both")(dy)
        xc, b = op("quantise_columns")(x), op("quantise_weight")(w)
        main = torch.zeros(n, k, device="cuda")
        bf16 = bench.time([lambda: dy @ w])
        ms = bench.time([lambda: op("dgrad_fp8_matmul")(d, b)])
        bench.record(
            "backward GEMMs, 8192 rows",
            f"dgrad {n}x{k}",
            ms,
            flops=flops,
            bf16_ms=round(bf16, 4),
            ratio=round(bf16 / ms, 3),
        )
        bf16 = bench.time([lambda: dy.t() @ x])
        for name, out in (("wgrad", None), ("wgrad, added to fp32", main)):
            ms = bench.time([lambda: op("wgrad_fp8_matmul")(dc, xc, out)])
            extra = {"bf16_ms": round(bf16, 4), "ratio": round(bf16 / ms, 3)}
            bench.record("backward GEMMs, 8192 rows", f"{name} {n}x{k}", ms, flops=flops, **extra)


def few_rows(bench) -> None:
    """At most 256 rows the weight's bytes decide: GB/s, and BF16 beside it."""
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        copies = max(2, min(8, 200_000_000 // (n * k)))
        ws = [randn(n, k) for _ in range(copies)]
        bs = [op("quantise_weight")(w) for w in ws]
        for m in FEW_ROWS:
            x = randn(m, k)
            a = op("quantise_activation")(x)
            bf16 = bench.time([lambda w=w: F.linear(x, w) for w in ws])
            alone = bench.time([lambda b=b: op("block_fp8_matmul")(a, b) for b in bs])
            both = bench.time(
                [lambda b=b: op("block_fp8_matmul")(op("quantise_activation")(x), b) for b in bs]
            )
            bench.record(
                "linear forward, few rows", f"{m} x {n} x {k}", alone, bytes_=n * k + 3 * m * k / 2 + 2 * m * n,
                bf16_ms=round(bf16, 5), bf16_GB_per_s=round(2 * (n * k + m * k + m * n) / bf16 / 1e6),
                gemm_alone=round(bf16 / alone, 3), with_quantiser=round(bf16 / both, 3),
            )  # fmt: skip


def invariance(bench) -> None:
    """Which BF16 GEMMs give a row the same bits for every number of rows, and what the invariant one costs."""
    for n, k in (*WEIGHTS, *HEADS):
        x, w = randn(TOKENS, k), randn(n, k)
        for name, product in (
            ("cuBLAS", F.linear),
            ("invariant_matmul", op("invariant_matmul")),
            ("triton", matmul.invariant_matmul),
        ):
            full = product(x, w)
            differing = [
                m for m in (*FEW_ROWS, 2, 7, 1024, 4096) if not torch.equal(product(x[:m], w), full[:m])
            ]
            ms, few = bench.time([lambda p=product: p(x, w)], 5), bench.time([lambda p=product: p(x[:64], w)])
            del full
            bench.record(
                "BF16 row invariance", f"{name} {n}x{k}", ms, flops=2 * TOKENS * n * k, ms_at_64_rows=round(few, 4),
                rows_with_other_bits=sorted(differing) or "none",
            )  # fmt: skip


def refused(bench) -> None:
    """The Triton FP8 GEMM on a shape that DeepGEMM refuses (4304 is SigLIP's FFN width) and on one it takes."""
    for n, k in ((4304, 1152), (1152, 4304), (4096, 4096)):
        x, w = randn(TOKENS, k), randn(n, k)
        a, b = op("quantise_activation")(x), op("quantise_weight")(w)
        bf16, ms = bench.time([lambda: F.linear(x, w)]), bench.time([lambda: matmul.block_fp8_matmul(a, b)])
        bench.record(
            "Triton FP8 GEMM",
            f"{n}x{k}",
            ms,
            flops=2 * TOKENS * n * k,
            bf16_ms=round(bf16, 4),
            ratio=round(bf16 / ms, 3),
        )


def log_probs(bench) -> None:
    """Log-probs of sampled tokens over a vocabulary of 151 936, against torch.log_softmax and gather."""
    t, v = 4096, 151936
    logits, ids = randn(t, v, dtype=torch.float32), torch.randint(0, v, (t,), device="cuda")
    eager = bench.time([lambda: torch.log_softmax(logits, -1).gather(-1, ids[:, None])], 5)
    ms = bench.time([lambda: logprobs.token_logprobs(logits, ids)], 5)
    bench.record(
        "log-probs",
        f"token_logprobs {t}x{v}",
        ms,
        bytes_=4 * t * v,
        torch_ms=round(eager, 3),
        ratio=round(eager / ms, 2),
    )
    ms = bench.time([lambda: logprobs.token_logprobs(logits, ids, 0.7, True)], 5)
    bench.record("log-probs", f"token_logprobs {t}x{v}, temperature and entropy", ms, bytes_=4 * t * v)
    _, _, lse = logprobs.token_logprobs(logits, ids)
    d = torch.ones(t, device="cuda")
    ms = bench.time([lambda: logprobs.token_logprobs_backward(d, None, logits, ids, lse, None, 1.0)], 5)
    bench.record("log-probs", f"token_logprobs backward {t}x{v}", ms, bytes_=8 * t * v)


def attention(bench) -> None:
    """FlashAttention-3 forward and the flash backward, 4 sequences of 2048, 32/8 heads of 128."""
    q, k, v = (randn(TOKENS, h, 128) for h in (32, 8, 8))
    layout = AttentionLayout(torch.arange(0, TOKENS + 1, 2048, device="cuda"))
    flops = 4 * 2048**2 * 128 * 32 * 4 / 2
    o, lse = op("attention")(q, k, v, layout)
    bench.record("attention", "forward", bench.time([lambda: op("attention")(q, k, v, layout)]), flops=flops)
    ms = bench.time_eager(lambda: op("attention_backward")(o, q, k, v, o, lse, layout))
    bench.record("attention", "backward, deterministic", ms, flops=2.5 * flops)


def layer(bench) -> None:
    """Forward and backward of one decoder layer: see `kernel_layer`."""
    from kernel_layer import compare

    compare(bench)


def others(bench) -> None:
    """torchao's blockwise FP8 linear (quantises activation and weight in each call), where it is installed."""
    import torchao
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    for n, k in ((6144, 4096), (28672, 4096)):
        x, w = randn(TOKENS, k), randn(n, k)
        bf16 = bench.time_eager(lambda: F.linear(x, w))
        ours = bench.time_eager(
            lambda: op("block_fp8_matmul")(op("quantise_activation")(x), op("quantise_weight")(w))
        )
        for triton_gemm in (True, False):
            label = f"torchao {torchao.__version__} {'triton' if triton_gemm else 'F.scaled_mm'} {n}x{k}"
            try:
                ms = bench.time_eager(
                    lambda t=triton_gemm: fp8_blockwise_mm.apply(x, w, 128, torch.bfloat16, t)
                )
            except Exception as error:
                bench.rows.append(
                    {
                        "section": "other libraries",
                        "name": f"{label}: {type(error).__name__}: {str(error)[:120]}",
                    }
                )
                continue
            bench.record(
                "other libraries", label, ms, flops=2 * TOKENS * n * k, bf16_ms=round(bf16, 4),
                ratio=round(bf16 / ms, 3), ours_same_work_ms=round(ours, 4),
            )  # fmt: skip


def warm(share: int, shares: int) -> None:
    """Compile every DeepGEMM kernel of the sections (4 s each, cached on disk); run ``shares`` of these at once."""
    jobs = [("fp8", m, n, k) for n, k in WEIGHTS for m in (TOKENS, *FEW_ROWS)]
    jobs += [(kind, TOKENS, n, k) for n, k in WEIGHTS for kind in ("dgrad", "wgrad")]
    jobs += [("bf16", m, n, k) for n, k in (*WEIGHTS, *HEADS) for m in (TOKENS, *FEW_ROWS)]
    started = time.time()
    for kind, m, n, k in jobs[share::shares]:
        if kind == "bf16":
            op("invariant_matmul")(randn(m, k), randn(n, k))
            continue
        w = op("quantise_weight")(randn(n, k))
        if kind == "fp8":
            op("block_fp8_matmul")(op("quantise_activation")(randn(m, k)), w)
        elif kind == "dgrad":
            op("dgrad_fp8_matmul")(op("quantise_activation")(randn(m, n)), w)
        else:
            op("wgrad_fp8_matmul")(op("quantise_columns")(randn(m, n)), op("quantise_columns")(randn(m, k)))
    torch.cuda.synchronize()
    print(f"share {share}: {len(jobs[share::shares])} kernels in {time.time() - started:.0f} s")


SECTIONS = {
    "memory": memory,
    "linear": linear,
    "backward": backward,
    "few_rows": few_rows,
    "layer": layer,
    "attention": attention,
    "log_probs": log_probs,
    "invariance": invariance,
    "refused": refused,
    "others": others,
}
