"""Is the rollout exactly on-policy, and what does it cost? Samples with vLLM, scores with the learner, compares bits.

    python benchmarks/on_policy.py --shape small --policies unified-fp8 bf16 --rounds group long --train-steps 10 100
    python benchmarks/on_policy.py --stock fp8 --score --shape small --out s.json     # vLLM without this project
    python benchmarks/on_policy.py --engine-only --shape qwen3-8b --rounds rate-1 rate-64 rate-256

Weights are random and seeded, or those of a directory (``--model``). Delta = learner's minus engine's log-prob of a
sampled token. Learner and engine are in one process here (the engine's worker without its Ray actor), so that one GPU
machine without Ray can run it. Rounds are defined in benchmarks/flow/workload.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# transformers imports whatever is called `kernels` (its kernel hub); beside this script that is kernels.py.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE / "flow"), *(p for p in sys.path if Path(p).resolve() != HERE)]

import stock  # noqa: E402
import torch  # noqa: E402
from scoring import compare, policy_gradient_steps, warm_up  # noqa: E402
from workload import Round, Turns, add_arguments, chosen_rounds, make_config, random_weights, typical  # noqa: E402


class Pair:
    """A learner's model and an engine with its weights, under one policy."""

    def __init__(self, args: argparse.Namespace, policy: str) -> None:
        from precision_policies import PrecisionPolicy, load_policy
        from rllib_llm.engines.vllm.worker import VLLMWorker, WorkerOptions

        self.args, self.policy = args, load_policy(policy)
        if args.masters:
            self.policy = PrecisionPolicy.from_dict(self.policy.to_dict() | {"master_dtype": args.masters})
        os.environ.update(self.policy.environment(engine="vllm", device=args.device))
        self.model, directory = self._learner()
        options = WorkerOptions(
            device=args.device, max_model_len=args.context, max_num_seqs=args.sequences,
            max_num_batched_tokens=args.batched_tokens, kv_cache_bytes=args.kv_gib << 30,
            gpu_memory_utilization=args.memory, enable_prefix_caching=True, cuda_graphs=args.device == "cuda",
            sleep_mode=False, has_tokenizer=False, seed=0, graph_tokens=args.graph_tokens,
        )  # fmt: skip
        begin = time.time()
        self.worker = VLLMWorker(directory, self.policy.to_dict(), options)
        self.start_s = time.time() - begin
        self.vocab, self.version = self.worker.model.lm.architecture.vocab, 0
        if args.engine_only:
            self.worker.load(1, self._noise())
        else:
            self.sync()

    def _learner(self) -> tuple[Any, str]:
        from rllib_llm.models import build_model
        from rllib_llm.models.checkpoint import load_pretrained

        if self.args.model:
            return load_pretrained(self.args.model, self.policy, "train").to(
                self.args.device
            ), self.args.model
        config = make_config(self.args.shape, self.args.context)
        directory = tempfile.mkdtemp()
        config.save_pretrained(directory)
        if self.args.engine_only:
            return None, directory
        with torch.device(self.args.device):
            model = build_model(config, self.policy, "train")
        random_weights(model)
        return model, directory

    def _noise(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights for a measurement of rates: normal codes with a scale of 0.02, norms 1, without a learner."""
        for name, spec in self.worker.model.lm.weight_specs().items():
            dtype = getattr(torch, spec.dtype)
            if name.endswith("_scale_inv"):
                yield name, torch.full(spec.shape, 0.02, dtype=dtype, device=self.args.device)
            elif "norm" in name:
                yield name, torch.ones(spec.shape, dtype=dtype, device=self.args.device)
            else:
                noise = torch.randn(spec.shape, device=self.args.device)
                yield name, (noise if "float8" in spec.dtype else 0.02 * noise).to(dtype)

    def sync(self) -> float:
        """Seconds to quantise all weights once and put them into the engine, GPU to GPU, without hashes."""
        self._wait()
        begin = time.time()
        self.version += 1
        self.worker.load(self.version, self.model.rollout_tensors())
        self._wait()
        return time.time() - begin

    def _wait(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def warm(self) -> None:
        """Compile what scoring, and training if asked for, will need; no weight changes."""
        if self.args.engine_only:
            return
        prompt = [2 + i % 100 for i in range(self.args.context // 2)]
        for count in (max(1, self.args.packed_tokens // len(prompt)), 1):
            warm_up(self.model, self.args, [prompt] * count, backward=bool(self.args.train_steps))

    def _answers(self, prompts: list[list[int]], params: Any, seeds: list[list[int]], r: Round) -> Any:
        """What `VLLMWorker.generate` returns, of answers that need not be equally long."""
        if not r.spread:
            return self.worker.generate(prompts, params, seeds)
        from rllib_llm.engines.vllm.worker import _sampled

        self.worker._use_distribution(params)
        asked = [(p, seed) for p, row in zip(prompts, seeds, strict=True) for seed in row]
        limits = [dataclasses.replace(params, max_tokens=length) for length in r.answer_lengths()]
        outputs = self.worker.llm.generate(
            [{"prompt_token_ids": p} for p, _ in asked],
            [self.worker._vllm_params(x, seed, len(p)) for x, (p, seed) in zip(limits, asked, strict=True)],
            use_tqdm=False,
        )
        return [[_sampled(output.outputs[0])] for output in outputs]

    def round(self, r: Round, after: int = 0) -> dict[str, Any]:
        """Sample, score, compare: one row of the table."""
        from rllib_llm.engines.base import SamplingParams

        params = SamplingParams(
            n=r.n, max_tokens=r.new_tokens, temperature=r.temperature, top_k=r.top_k, top_p=r.top_p,
            ignore_eos=r.ignore_eos, seed=r.seed,
        )  # fmt: skip
        prompts = r.prompt_ids(self.vocab)
        taken = []
        for repeat in range(r.repeats):
            seeds = [[1000 * p + i + repeat for i in range(r.n)] for p in range(len(prompts))]
            begin = time.time()
            answers = self._answers(prompts, params, seeds, r)
            taken.append(time.time() - begin)
        seconds = typical(taken)
        samples = [(p, ids, lp) for p, row in zip(prompts, answers, strict=True) for ids, lp, _ in row]
        tokens = sum(len(ids) for _, ids, _ in samples)
        row = {
            "shape": self.args.model or self.args.shape, "policy": self.policy.name, "round": r.name,
            "optimiser_steps": after, "version": self.version, "tokens": tokens, "rollout_s": seconds, "taken_s": taken,
            "rollout_tokens_per_s": tokens / seconds, "engine_start_s": self.start_s,
            "graph_tokens": self.args.graph_tokens,
        }  # fmt: skip
        row |= {} if self.args.engine_only else compare(self.model, self.args, samples, r)
        print(json.dumps(row), flush=True)
        return row


def run(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    turns = Turns(args.turns, args.parties)
    for policy in args.policies:
        pair = Pair(args, policy)
        pair.warm()
        for r in chosen_rounds(args):
            with turns.alone():
                rows.append(pair.round(r))
            save(args, rows)
        done = 0
        for steps in args.train_steps:
            with turns.alone():
                begin = time.time()
                prompts = chosen_rounds(args)[0].prompt_ids(pair.vocab)
                policy_gradient_steps(pair.model, args, steps - done, prompts)
                done, trained_s, sync_s = steps, time.time() - begin, pair.sync()
                row = pair.round(chosen_rounds(args)[0], after=steps)
            rows.append(row | {"train_s": trained_s, "sync_s": sync_s})
            save(args, rows)
        del pair
        import gc

        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.out:
        head = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "arguments": vars(args)}
        if args.device == "cuda":
            head["device"] = torch.cuda.get_device_name()
        Path(args.out).write_text(json.dumps(head | {"rows": rows}, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--policies", nargs="+", default=["unified-fp8"])
    parser.add_argument("--model", help="a model directory instead of random weights of a shape")
    parser.add_argument(
        "--train-steps", nargs="*", type=int, default=[], help="e.g. 10 100: compare after each"
    )
    parser.add_argument(
        "--masters", choices=["float32", "bfloat16"], help="instead of the policy's, to save memory"
    )
    parser.add_argument("--engine-only", action="store_true", help="rates only: drop the learner's model")
    parser.add_argument(
        "--graph-tokens", type=int, default=1024, help="largest step with prompts in a CUDA graph"
    )
    parser.add_argument("--memory", type=float, default=0.6, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--stock", choices=["fp8", "bf16", "fp8-invariant", "bf16-invariant"])
    parser.add_argument(
        "--score", action="store_true", help="with --stock: the learner's weights, and its log-probs"
    )
    parser.add_argument(
        "--same-scales", action="store_true", help="with --stock fp8: fp32 scales, as the learner's"
    )
    args = parser.parse_args()
    stock.run(args, save) if args.stock else run(args)


if __name__ == "__main__":
    main()
