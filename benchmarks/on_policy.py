"""Is the rollout exactly on-policy? Samples with vLLM, scores the samples with the learner's packed forward,
compares bits.

    python benchmarks/on_policy.py --shape small --policies unified-fp8 bf16 --rounds group
    --train-steps 10 --out r.json python benchmarks/on_policy.py --stock fp8 --shape small --out s.json      #
    speed of vLLM without this project

Weights are random and seeded. Delta = learner's minus engine's log-prob of a sampled token. Learner and engine
are in one process here (the engine's worker without its Ray actor), so that one GPU machine without Ray can run it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# transformers imports whatever is called `kernels` (its kernel hub); beside this script that is kernels.py.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "tiny": (Qwen3Config, {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256}),
    "small": (Qwen3Config, {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12,
                            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
                            "vocab_size": 32768}),
    "qwen3-8b": (Qwen3Config, {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                               "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                               "vocab_size": 151936}),
    "llama-3.1-8b": (LlamaConfig, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                   "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                                   "vocab_size": 128256}),
}  # fmt: skip


def make_config(shape: str, context: int) -> Any:
    kind, sizes = SHAPES[shape]
    return kind(
        **sizes, max_position_embeddings=context, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1
    )


def prompt_lengths(count: int, longest: int) -> list[int]:
    """1 … longest tokens, uneven: quadratic spacing in shuffled order."""
    generator = torch.Generator().manual_seed(7)
    lengths = (torch.linspace(1, longest**0.5, count) ** 2).long().clamp(1, longest)
    return lengths[torch.randperm(count, generator=generator)].tolist()


def make_prompts(count: int, longest: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [
        torch.randint(2, vocab, (n,), generator=generator).tolist() for n in prompt_lengths(count, longest)
    ]


class Pair:
    """A learner's model and an engine with its weights, under one policy."""

    def __init__(self, args: argparse.Namespace, policy: str) -> None:
        from precision_policies import load_policy
        from rllib_llm.engines.vllm.worker import VLLMWorker, WorkerOptions
        from rllib_llm.models import build_model

        self.args, self.policy = args, load_policy(policy)
        self.config = make_config(args.shape, args.context)
        os.environ.update(self.policy.environment(engine="vllm", device=args.device))
        torch.manual_seed(0)
        with torch.device(args.device):
            self.model = build_model(self.config, self.policy, "train")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(
                    0, 0.04 if "lm_head" in name else 0.02
                )
        directory = tempfile.mkdtemp()
        self.config.save_pretrained(directory)
        options = WorkerOptions(
            device=args.device, max_model_len=args.context, max_num_seqs=args.sequences,
            max_num_batched_tokens=args.batched_tokens, kv_cache_bytes=args.kv_gib << 30, gpu_memory_utilization=0.6,
            enable_prefix_caching=True, cuda_graphs=True, sleep_mode=False, has_tokenizer=False, seed=0,
        )  # fmt: skip
        begin = time.time()
        self.worker = VLLMWorker(directory, self.policy.to_dict(), options)
        self.start_s = time.time() - begin
        self.version = 0
        self.sync()

    def sync(self) -> float:
        """Seconds to quantise all weights once and put them into the engine, GPU to GPU."""
        self._wait()
        begin = time.time()
        self.version += 1
        self.worker.load(self.version, self.model.rollout_tensors())
        self._wait()
        return time.time() - begin

    def _wait(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()

    def round(self, name: str, prompts: list[list[int]], params: Any) -> dict[str, Any]:
        """Sample, score, compare: one row of the table."""
        seeds = [[1000 * p + i for i in range(params.n)] for p in range(len(prompts))]
        begin = time.time()
        answers = self.worker.generate(prompts, params, seeds)
        seconds = time.time() - begin
        pairs = [(p, ids, lp) for p, row in zip(prompts, answers, strict=True) for ids, lp, _ in row]
        begin = time.time()
        delta = self._deltas(pairs, params)
        row = {
            "shape": self.args.shape, "policy": self.policy.name, "round": name, "version": self.version,
            "tokens": len(delta), "sequences": len(pairs), "longest_answer": max(len(ids) for _, ids, _ in pairs),
            "longest_prompt": max(map(len, prompts)), "max_abs": delta.abs().max().item(),
            "mean_abs": delta.abs().mean().item(), "k3": (delta.exp() - 1 - delta).mean().item(),
            "bit_equal_share": (delta == 0).double().mean().item(), "rollout_tokens_per_s": len(delta) / seconds,
            "score_s": time.time() - begin, "mean_logprob": sum(float(lp.sum()) for _, _, lp in pairs) / len(delta),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        return row

    def _deltas(self, pairs: list[Any], params: Any) -> torch.Tensor:
        deltas, group, size = [], [], 0
        for pair in [*pairs, None]:
            if pair is None or size + len(pair[0]) + len(pair[1]) > self.args.packed_tokens:
                if group:
                    deltas += self._score(group, params)
                group, size = [], 0
            if pair is not None:
                group.append(pair)
                size += len(pair[0]) + len(pair[1])
        return torch.cat(deltas).double()

    def _score(self, group: list[Any], params: Any) -> list[torch.Tensor]:
        from rllib_llm.models import PackedBatch

        batch = PackedBatch.from_sequences([p + ids.tolist() for p, ids, _ in group]).to(
            torch.device(self.args.device)
        )
        with torch.no_grad():
            logp = self.model.token_logprobs(
                self.model(batch),
                torch.roll(batch.input_ids, -1),
                params.temperature,
                params.top_k,
                params.top_p,
            ).cpu()
        bounds = batch.cu_seqlens.tolist()
        return [
            logp[start + len(p) - 1 : stop - 1] - torch.from_numpy(lp)
            for (p, _, lp), start, stop in zip(group, bounds[:-1], bounds[1:], strict=True)
        ]

    def train(self, steps: int, prompts: list[list[int]]) -> None:
        """Real optimiser steps (AdamW, fp32 masters) on a policy-gradient loss with random advantages."""
        from rllib_llm.models import PackedBatch

        optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        chosen = [p for p in prompts if len(p) > 64][:16]
        batch = PackedBatch.from_sequences(chosen).to(torch.device(self.args.device))
        advantages = torch.randn(len(batch.input_ids), device=self.args.device)
        for _ in range(steps):
            logp = self.model.token_logprobs(self.model(batch), torch.roll(batch.input_ids, -1))
            loss = -(logp * advantages).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            assert torch.isfinite(norm), "gradient is not finite"
            optimiser.step()
            optimiser.zero_grad()


def rounds_of(args: argparse.Namespace) -> dict[str, Any]:
    from rllib_llm.engines.base import SamplingParams

    n, new = args.group, args.new_tokens
    return {
        "group": (args.prompts, SamplingParams(n=n, max_tokens=new, ignore_eos=True, seed=1)),
        "uneven": (args.prompts * n, SamplingParams(n=1, max_tokens=new, seed=2)),
        "truncated": (
            args.prompts,
            SamplingParams(n=n, max_tokens=new, temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True),
        ),
        "single": (1, SamplingParams(n=1, max_tokens=new, ignore_eos=True, seed=3)),
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for policy in args.policies:
        pair = Pair(args, policy)
        vocab = pair.model.architecture.vocab
        short = type(rounds_of(args)["group"][1])(max_tokens=4)
        pair.worker.generate(make_prompts(4, 8, vocab), short, [[i] for i in range(4)])
        for name in args.rounds:
            count, params = rounds_of(args)[name]
            rows.append(pair.round(name, make_prompts(count, args.prompt_tokens, vocab), params))
            save(args, rows)
        if args.train_steps:
            pair.train(args.train_steps, make_prompts(64, args.prompt_tokens, vocab))
            sync_s = pair.sync()
            count, params = rounds_of(args)["group"]
            row = pair.round(
                f"group after {args.train_steps} steps",
                make_prompts(count, args.prompt_tokens, vocab),
                params,
            )
            rows.append(row | {"sync_s": sync_s})
        rows[-1] |= {"sync_again_s": pair.sync(), "engine_start_s": pair.start_s}
        save(args, rows)
        del pair
        import gc

        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def stock(args: argparse.Namespace) -> list[dict[str, Any]]:
    """vLLM as it comes, default settings, same requests: tokens/s."""
    from vllm import LLM, SamplingParams

    config = make_config(args.shape, args.context)
    directory = tempfile.mkdtemp()
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(directory)
    overrides: dict[str, Any] = {}
    if args.stock == "fp8":
        overrides["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        }  # fmt: skip
    llm = LLM(
        model=directory, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", hf_overrides=overrides,
        max_model_len=args.context, max_num_seqs=args.sequences, max_num_batched_tokens=args.batched_tokens,
        kv_cache_memory_bytes=args.kv_gib << 30, seed=0,
    )  # fmt: skip
    rows = []
    for name in args.rounds:
        count, params = rounds_of(args)[name]
        requests = [
            {"prompt_token_ids": p}
            for p in make_prompts(count, args.prompt_tokens, config.vocab_size)
            for _ in range(params.n)
        ]
        sampling = SamplingParams(max_tokens=params.max_tokens, logprobs=0, ignore_eos=True, detokenize=False)
        llm.generate(requests[:4], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
        begin = time.time()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        rows.append({"shape": args.shape, "policy": f"stock vLLM {args.stock}", "round": name, "tokens": tokens,
                     "rollout_tokens_per_s": tokens / (time.time() - begin)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        save(args, rows)
    return rows


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
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--policies", nargs="+", default=["unified-fp8"])
    parser.add_argument(
        "--rounds", nargs="+", default=["group"], choices=["group", "uneven", "truncated", "single"]
    )
    parser.add_argument("--stock", choices=["fp8", "bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in {
        "context": 4096, "sequences": 128, "prompts": 32, "group": 4, "prompt-tokens": 2000, "new-tokens": 1024,
        "batched-tokens": 8192, "kv-gib": 24, "packed-tokens": 32768, "train-steps": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    args = parser.parse_args()
    stock(args) if args.stock else run(args)


if __name__ == "__main__":
    main()
