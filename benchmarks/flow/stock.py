"""vLLM as it comes, on the weights that the learner exports: its rate, and its distance from the learner."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from scoring import compare
from workload import Round, Turns, chosen_rounds, make_config, random_weights, typical

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def export(args: argparse.Namespace, config: Any, policy: Any, directory: str) -> Any:
    """The learner's model; its rollout tensors (FP8 under an FP8 policy) become a Hugging Face checkpoint."""
    from safetensors.torch import save_file

    from rllib_llm.models import build_model

    with torch.device(args.device):
        model = build_model(config, policy, "train")
    random_weights(model)
    tensors = {name: t.cpu().contiguous() for name, t in model.rollout_tensors()}
    save_file(tensors, str(Path(directory) / "model.safetensors"), metadata={"format": "pt"})
    return model


class Stock:
    """A `vllm.LLM` with default settings. score: also compare with the learner; else weights are vLLM's dummies."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        from vllm import LLM

        from precision_policies import load_policy

        self.args, self.kind = args, kind
        self.config = make_config(args.shape, args.context)
        self.config.architectures = [type(self.config).__name__.replace("Config", "ForCausalLM")]
        self.config.dtype = "bfloat16"
        directory = tempfile.mkdtemp()
        fp8 = kind.startswith("fp8")
        if fp8:
            self.config.quantization_config = FP8
        self.config.save_pretrained(directory)
        self.model = None
        if args.score:
            policy = load_policy("unified-fp8" if fp8 else "bf16")
            self.model = export(args, make_config(args.shape, args.context), policy, directory)
        if kind.endswith("-invariant"):
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if args.same_scales:
            os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
        begin = time.time()
        self.llm = LLM(
            model=directory, skip_tokenizer_init=True, load_format="auto" if args.score else "dummy",
            max_model_len=args.context, max_num_seqs=args.sequences, max_num_batched_tokens=args.batched_tokens,
            kv_cache_memory_bytes=args.kv_gib << 30, gpu_memory_utilization=args.memory, seed=0,
        )  # fmt: skip
        self.start_s = time.time() - begin

    def round(self, r: Round) -> dict[str, Any]:
        from vllm import SamplingParams

        prompts = [p for p in r.prompt_ids(self.config.vocab_size) for _ in range(r.n)]
        sampling = [
            SamplingParams(
                max_tokens=length, logprobs=0, ignore_eos=r.ignore_eos, detokenize=False, temperature=r.temperature,
                top_k=r.top_k or -1, top_p=r.top_p,
            )
            for length in r.answer_lengths()
        ]  # fmt: skip
        taken = []
        for _ in range(r.repeats):
            begin = time.time()
            outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
            taken.append(time.time() - begin)
        seconds = typical(taken)
        samples = []
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            samples.append(
                (prompt, ids, [d[i].logprob for d, i in zip(output.outputs[0].logprobs, ids, strict=True)])
            )
        tokens = sum(len(ids) for _, ids, _ in samples)
        row = {
            "shape": self.args.shape, "policy": f"stock vLLM {self.kind}", "round": r.name, "tokens": tokens,
            "rollout_s": seconds, "taken_s": taken, "rollout_tokens_per_s": tokens / seconds,
            "engine_start_s": self.start_s,
            "scales": "fp32" if self.args.same_scales else "vLLM's default",
        }  # fmt: skip
        # vLLM reports log-probs of the plain distribution (logprobs_mode=raw_logprobs).
        sampling = argparse.Namespace(temperature=1.0, top_k=0, top_p=1.0)
        return row if self.model is None else row | compare(self.model, self.args, samples, sampling)


def run(args: argparse.Namespace, save: Any) -> None:
    """All rounds of one stock engine."""
    engine = Stock(args, args.stock)
    turns, rows = Turns(args.turns, args.parties), []
    for r in chosen_rounds(args):
        with turns.alone():
            rows.append(engine.round(r))
        print(json.dumps(rows[-1]), flush=True)
        save(args, rows)
