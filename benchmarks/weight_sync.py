"""Seconds and memory of a weight push, per transport: a learner and an engine's model in two processes.

    python benchmarks/weight_sync.py --shape qwen3-8b --out benchmarks/results/weight_sync_h200.json
    python benchmarks/weight_sync.py --reload --shape qwen3-8b --out r.json       # vLLM's own reload_weights, stock FP8

Weights are random. The engine's side is the rollout `CausalLM` (what vLLM runs, without vLLM), in a process of its own:
it verifies, applies and hashes as an engine does. A push is timed from the learner's changed weights to the compared
receipt: quantisation and hashing of the manifest, both readings, the copy, and the hashes of what is then held.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_HERE = Path(__file__).resolve().parent
# transformers imports whatever is called `kernels` (its kernel hub); beside this script that is kernels.py.
sys.path[:] = [str(_HERE / "flow"), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

import torch  # noqa: E402
from workload import SHAPES, make_config  # noqa: E402

_CONTEXT = 2048


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Holder:
    """The engine's side: a rollout model that takes updates."""

    def __init__(self, shape: str, policy: str, device: str) -> None:
        from rllib_llm.models import build_model
        from rllib_llm.sync.stream import Groups
        from rllib_llm.sync.topology import place_of

        with torch.device(device):
            self.model = build_model(make_config(shape, _CONTEXT), policy, "rollout")
        self.device, self.groups, self.place = device, Groups(), place_of(device)
        self.chunks: list[Any] = []

    def where(self) -> Any:
        return self.place

    def take(self, update: Any) -> tuple[Any, int]:
        """(receipt, most GPU bytes beyond the weights)."""
        from rllib_llm.sync.take import take_update

        before = self._reset_peak()
        receipt = take_update(update, self.model, self.groups, lambda: None, lambda version: None)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        return receipt, peak - before

    def _reset_peak(self) -> int:
        if self.device != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def serve_holder(pipe: Any, shape: str, policy: str, device: str) -> None:
    """The holder's process: calls come and answers go through a pipe."""
    holder = Holder(shape, policy, device)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(holder, method)(*arguments)))
        except Exception as error:
            pipe.send((False, repr(error)))


class Remote:
    """A `Holder` in another process."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_holder, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def start(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def finish(self, timeout_s: float = 120.0) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        good, value = self.pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value


class Bench:
    """A learner's model here and a `Holder` in another process, under one policy."""

    def __init__(self, args: argparse.Namespace, policy: str) -> None:
        from precision_policies import load_policy
        from rllib_llm.models import build_model
        from rllib_llm.process.attest import prepare_process

        self.args, self.policy, self.device = args, policy, args.device
        prepare_process(load_policy(policy), "torch", self.device)
        self.holder = Remote(args.shape, policy, self.device)
        self.holder.start("where")
        with torch.device(self.device):
            self.model = build_model(make_config(args.shape, _CONTEXT), policy, "train")
        self.change()
        self.place = self.holder.finish()
        self.version = 0

    def change(self) -> None:
        """Other weights, as after an optimiser step."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02)
        wait(self.device)

    def push(self, transport: str) -> dict[str, float]:
        """One push; seconds of its parts, extra bytes on both sides."""
        self.change()
        self.version += 1
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        made, (receipt, theirs), hashes = getattr(self, f"_{transport}", partial(self._stream, transport))()
        wait(self.device)
        seconds = time.perf_counter() - begin
        assert dict(receipt.hashes) == dict(hashes)
        ours = torch.cuda.max_memory_allocated() - held if self.device == "cuda" else 0
        return {
            "seconds": seconds,
            "manifest_s": made,
            "extra_learner_bytes": ours,
            "extra_engine_bytes": theirs,
        }

    def hashing(self) -> tuple[int, float]:
        """(bytes of all tensors that are sent, seconds to hash them where they lie: median of three)."""
        from rllib_llm.weights.format import hash_tensors

        tensors, seconds = dict(self.model.rollout_tensors()), []
        for _ in range(4):
            wait(self.device)
            begin = time.perf_counter()
            hash_tensors(tensors)
            seconds.append(time.perf_counter() - begin)
        return sum(t.numel() * t.element_size() for t in tensors.values()), statistics.median(seconds[1:])

    def _manifest(self) -> tuple[float, Any]:
        from rllib_llm.sync.export import export_manifest

        begin = time.perf_counter()
        manifest = export_manifest(self.model, self.version)
        return time.perf_counter() - begin, manifest

    def _stream(self, transport: Any) -> Any:
        from rllib_llm.sync.stream import WeightSender

        if not hasattr(self, "sender"):
            self.sender = WeightSender(torch.device(self.device), "127.0.0.1", 120.0)
        made, manifest = self._manifest()
        [offer] = self.sender.offer(manifest, transport, [self.place.identity])
        thread = threading.Thread(target=self.sender.send, args=(offer.push, self._again))
        self.holder.start("take", offer)
        thread.start()
        result = self.holder.finish()
        thread.join()
        return made, result, manifest.hashes

    def _host_memory(self) -> Any:
        """What the object store does, without Ray's copies: to the host, verified and applied from there."""
        from rllib_llm.sync.export import export_weights

        begin = time.perf_counter()
        update = export_weights(self.model, self.version)
        made = time.perf_counter() - begin
        return made, self._local().take(update), update.hashes

    def _again(self) -> Any:
        """As the learner reads its weights after the manifest."""
        return self.model.rollout_tensors(again=True)

    def _local(self) -> Holder:
        if not hasattr(self, "local"):
            self.local = Holder(self.args.shape, self.policy, self.device)
        return self.local

    def _in_process(self) -> Any:
        from rllib_llm.sync.receiver import InProcessUpdate

        made, manifest = self._manifest()
        return (
            made,
            self._local().take(InProcessUpdate(manifest, self._again)),
            manifest.hashes,
        )


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for policy in args.policies:
        bench = Bench(args, policy)
        size, hashing = bench.hashing()
        for name in args.transports:
            transport, _, count = name.partition(":")
            pushes: list[dict[str, float]] = []
            try:
                for _ in range(int(count or args.repeats)):
                    pushes.append(bench.push(transport))
            except Exception as error:
                print(f"{policy} {transport}: {error!r}", flush=True)
            if not pushes:
                continue
            kept = pushes[1:] or pushes  # the first one forms groups, opens buffers and compiles kernels
            row = {
                "policy": policy, "transport": transport, "gigabytes": size / 1e9, "pushes": len(kept),
                "first_s": pushes[0]["seconds"], "hash_s": hashing,
            } | {key: statistics.median(p[key] for p in kept) for key in kept[0]}  # fmt: skip
            print(json.dumps(row), flush=True)
            rows.append(row)
            save(args, rows)
        bench.holder.process.kill()
        del bench
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what is known so far: a run that is cut short keeps its rows."""
    if args.out:
        machine = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        result = {"machine": machine, "torch": torch.__version__, "shape": args.shape, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure_reload(args: argparse.Namespace) -> list[dict[str, Any]]:
    """vLLM's own `reload_weights` of a stock block-FP8 model in this process, from tensors on the GPU: no hashes, no
    verification, no transport."""
    import tempfile

    from vllm import LLM

    config = make_config(args.shape, _CONTEXT)
    config.quantization_config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    }  # fmt: skip
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    directory = tempfile.mkdtemp()
    config.save_pretrained(directory)
    llm = LLM(
        directory, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=4,
        max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.15,
    )  # fmt: skip
    tensors = list(checkpoint_tensors(args.shape))
    seconds = []
    for _ in range(args.repeats):
        wait("cuda")
        begin = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        llm.reset_prefix_cache()
        wait("cuda")
        seconds.append(time.perf_counter() - begin)
    size = sum(t.numel() * t.element_size() for _, t in tensors)
    row = {
        "policy": "stock vLLM FP8", "transport": "reload_weights, in process", "gigabytes": size / 1e9,
        "pushes": len(seconds) - 1, "first_s": seconds[0], "seconds": statistics.median(seconds[1:]),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return [row]


def checkpoint_tensors(shape: str) -> Any:
    """Random FP8 checkpoint of the shape, quantised beforehand, in Hugging Face names."""
    from rllib_llm.models import build_model

    with torch.device("cuda"):
        model = build_model(make_config(shape, _CONTEXT), "unified-fp8", "train")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
    yield from model.rollout_tensors()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--policies", nargs="+", default=["unified-fp8", "bf16"])
    parser.add_argument(
        "--transports",
        nargs="+",
        default=["in_process", "cuda_ipc", "host_memory:2"],
        help="with ':n' for n pushes",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--reload", action="store_true", help="measure stock vLLM's reload_weights instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    save(args, measure_reload(args) if args.reload else measure(args))


if __name__ == "__main__":
    main()
