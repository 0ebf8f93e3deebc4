"""An optimiser step of a whole model against the time that copying its bytes takes, for each format of its state.

    python benchmarks/optimizer.py --shape 8b --formats split_float32:blockwise_8bit --out optimizer.json

The floor is bytes / bandwidth: weights and moments are read and written, gradients read, and the bandwidth is that of a
device-to-device copy on the same GPU, read and written bytes counted. Times are medians of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
# transformers imports whatever is called `kernels` (its kernel hub); beside this script that is kernels.py.
sys.path[:] = [str(HERE / "end_to_end"), *(p for p in sys.path if Path(p).resolve() != HERE)]

from model import SHAPES  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "split_float32": torch.bfloat16}


def parameter_shapes(shape: str, layers: int | None) -> list[tuple[int, ...]]:
    """Of every parameter of a Qwen3 model."""
    s = SHAPES[shape]
    hidden, inner, head = s["hidden_size"], s["intermediate_size"], s["head_dim"]
    queries, keys = s["num_attention_heads"] * head, s["num_key_value_heads"] * head
    layer = [
        (queries, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, queries),
        (head,),
        (head,),
        (hidden,),
    ]
    layer += [(hidden,), (inner, hidden), (inner, hidden), (hidden, inner)]
    ends = [(s["vocab_size"], hidden)] * (1 if s["tie_word_embeddings"] else 2)
    return [*layer * (layers or s["num_hidden_layers"]), *ends, (hidden,)]


def timed(function: Any, repeats: int) -> float:
    """Median seconds of a function's work on the GPU, after two calls that warm up."""
    for _ in range(2):
        function()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(spans)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), 20)


def measure(
    shapes: list[tuple[int, ...]], master: str, moments: str, bandwidth: float, repeats: int
) -> dict[str, Any]:
    """One row: time, floor and their ratio for weights and moments in these formats."""
    from precision_kernels import empty_low_half
    from precision_policies.memory import GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
    from rllib_llm.learner.gradients import Gradients
    from rllib_llm.learner.optimizer import PolicyAdamW

    torch.cuda.reset_peak_memory_stats()
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").mul_(0.02).to(DTYPES[master])) for s in shapes]
    halves = [empty_low_half(p.shape, "cuda") for p in params] if master == "split_float32" else []
    low = {p: (lambda half=half: half) for p, half in zip(params, halves, strict=False)}
    gradients = [torch.randn(s, device="cuda").mul_(1e-4) for s in shapes]
    optimizer = PolicyAdamW(params, 1e-6, state_dtype=moments, low_halves=low)
    step = timed(lambda: optimizer.update(dict(zip(params, gradients, strict=True))), repeats)
    norm = timed(lambda: Gradients.unscale_and_norm(dict(zip(params, gradients, strict=True)), 1.0), repeats)
    count = sum(p.numel() for p in params)
    moved = count * (2 * MASTER_BYTES[master] + 4 * MOMENT_BYTES[moments] + GRADIENT_BYTES)
    return {
        "master": master, "moments": moments, "parameters": count, "gib": torch.cuda.max_memory_allocated() / 2**30,
        "step_s": step, "floor_s": moved / bandwidth, "times_floor": step * bandwidth / moved, "norm_s": norm,
        "norm_times_floor": norm * bandwidth / (count * GRADIENT_BYTES),
    }  # fmt: skip


def main() -> None:
    """Measure each pair of formats, print and write rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for formats that do not fit")
    parser.add_argument(
        "--formats", nargs="+", default=["split_float32:blockwise_8bit"], help="master:moments"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = []
    for pair in args.formats:
        master, _, moments = pair.partition(":")
        shapes = parameter_shapes(args.shape, args.layers)
        rows.append(measure(shapes, master, moments, bandwidth, args.repeats))
        torch.cuda.empty_cache()
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            report = {"copy_bytes_per_s": bandwidth, "device": torch.cuda.get_device_name(), "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
