"""Times every kernel on one GPU beside its floor (bytes over the measured copy bandwidth, or FLOPs over the measured
BF16 peak), and beside PyTorch BF16 in the same run.

    python benchmarks/kernels.py --out h200.json    # all sections, and a Markdown table beside it
    python benchmarks/kernels.py --only memory linear --out x.json
    python benchmarks/kernels.py --warm 3/12                               # compile DeepGEMM's kernels, share 3 of 12

Each time is the median over replays of one CUDA graph that calls the kernel on several input sets in turn (together
larger than the L2), divided by the number of calls: launch gaps and Python are outside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from kernel_sections import SECTIONS, warm


class Bench:
    """Measures calls and keeps the rows of the table."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.bandwidth = self.peak = float("nan")

    def time(self, calls: list[Callable[[], object]], replays: int = 15) -> float:
        """Median milliseconds of one of ``calls``, replayed in turn from a CUDA graph."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self._median(graph.replay, replays) / len(calls)

    def time_eager(self, call: Callable[[], object], replays: int = 10) -> float:
        """Median milliseconds of ``call`` with its launches, for autograd."""
        for _ in range(3):
            call()
        return self._median(call, replays)

    @staticmethod
    def _median(call: Callable[[], object], replays: int) -> float:
        call()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(replays)
        ]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events)

    def record(
        self, section: str, name: str, ms: float, *, bytes_: float = 0, flops: float = 0, **extra
    ) -> dict:
        """One row: time, floor (the larger of both terms) and the share of the floor that is reached."""
        floor = max(bytes_ / self.bandwidth, flops / self.peak) * 1e3
        row = {"section": section, "name": name, "ms": round(ms, 5), "floor_ms": round(floor, 5)}
        row |= {"share_of_floor": round(floor / ms, 3)} if floor else {}
        row |= {"GB_per_s": round(bytes_ / ms / 1e6)} if bytes_ else {}
        row |= {"TFLOPS": round(flops / ms / 1e9)} if flops else {}
        self.rows.append(row | extra)
        print(json.dumps(self.rows[-1]), flush=True)
        return self.rows[-1]

    def ceilings(self) -> None:
        """Copy bandwidth (read + written bytes) and the BF16 rate of an 8192-cubed product on random data."""
        source, target = torch.randn(2**29, device="cuda"), torch.empty(2**29, device="cuda")
        # Outside a graph: inside, the copy becomes a memcpy node, which reached 2.8 TB/s only.
        ms = self.time_eager(lambda: target.copy_(source))
        self.bandwidth = 2 * source.nbytes / ms * 1e3
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ms_gemm = self.time([lambda: F.linear(a, b)])
        self.peak = 2 * 8192**3 / ms_gemm * 1e3
        self.record("ceilings", "device copy, 4 GB", ms, bytes_=2 * source.nbytes)
        self.record("ceilings", "torch BF16 8192x8192x8192", ms_gemm, flops=2 * 8192**3)


def environment() -> dict:
    """What the numbers depend on."""
    import triton

    from precision_kernels import bound_implementations

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "operators": bound_implementations("cuda"),
    }


def markdown(result: dict) -> str:
    """The results as one table per section."""
    env = result["environment"]
    lines = [
        f"# Kernels on one {env['gpu']}, {env['date']}",
        "",
        f"torch {env['torch']}, CUDA {env['cuda']}, triton {env['triton']}, "
        f"{env['operators'].get('block_fp8_matmul', '').split('#')[0]}, "
        f"{env['operators'].get('attention', '').split('#')[0]}.",
        f"`{env['command']}`. Medians; floor: bytes over the copy bandwidth or FLOPs over torch's BF16 rate.",
    ]
    for section in dict.fromkeys(row["section"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["section"] == section]
        keys = [k for k in dict.fromkeys(k for row in rows for k in row) if k != "section"]
        lines += ["", f"## {section}", "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        lines += ["| " + " | ".join(str(row.get(k, "")) for k in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", metavar="I/N")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.warm:
        warm(*map(int, arguments.warm.split("/")))
        return
    bench = Bench()
    bench.ceilings()
    for name in arguments.only:
        try:
            SECTIONS[name](bench)
        except Exception as error:  # a section that fails must not cost the others their device time
            bench.rows.append({"section": name, "name": f"FAILED {type(error).__name__}: {error}"})
            print(f"FAILED {name}: {error!r}", flush=True)
        torch.cuda.empty_cache()
        if arguments.out:
            result = {"environment": environment(), "rows": bench.rows}
            arguments.out.write_text(json.dumps(result, indent=1))
            arguments.out.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
