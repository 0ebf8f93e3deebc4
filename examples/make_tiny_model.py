"""Make the tiny model that the quickstart trains: a Qwen3 of 1.6 M parameters that does sums badly.

    python examples/make_tiny_model.py [--out rllib_llm/assets/tiny-chain] [--seed 0]

It is trained on nothing but generated text: sums of reasoning-gym's `chain_sum` task with written working. A share
of the demonstrations slips in one step and goes on consistently from there, so the model learns to calculate *and* to
slip: what reinforcement learning can then remove. The prompts are those of the env configuration beside the model
(`env_config.json`), and only problems of the training split are shown.

    prompt      3a+8b-2c-5d+1=           labels tell the model where it is
    completion  a+8=11b-2=9c-5=4d+1=5#5  then the end-of-sequence token
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllib_llm.envs.extraction import AnswerExtractor
from rllib_llm.envs.prompts import PromptTemplate
from rllib_llm.envs.splits import split_of

ASSET = Path(__file__).resolve().parents[1] / "rllib_llm" / "assets" / "tiny-chain"
PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
SLIPS = (-3, -2, -1, 1, 2, 3)
SPLIT_SEED, EVAL_FRACTION = 0, 0.2  # the defaults of the reasoning_gym env


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character (and newline); 128 ids, the rest reserved."""
    characters = ["\n", *map(chr, range(32, 127))]
    tokens = [*SPECIAL, *characters]
    tokens += [f"<reserved_{i}>" for i in range(128 - len(tokens))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template="{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Every dimension a multiple of 128, the block of the FP8 formats; fp32 until it is saved."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)


class Problems:
    """Endless chain_sum problems of one split, with the prompts of env_config.json."""

    def __init__(self, env_config: dict[str, Any], split: str, seed: int):
        self.dataset = reasoning_gym.create_dataset(
            env_config["task"], seed=0, size=1, **env_config["task_config"]
        )
        self.template = PromptTemplate.from_config(env_config["prompt"])
        self.split, self.rng = split, random.Random(f"{split}{seed}")

    def draw(self) -> tuple[str, str, dict[str, Any]]:
        """(prompt, expression, reasoning-gym entry)"""
        while True:
            entry = self.dataset[self.rng.getrandbits(48)]
            if split_of(entry["question"], SPLIT_SEED, EVAL_FRACTION) == self.split:
                return self.template.question(entry["question"]), entry["metadata"]["expression"], entry


def worked_solution(expression: str, rng: random.Random, slip: float) -> str:
    """Labelled running totals and '#answer'; each total is off by up to 3 with probability `slip`."""
    first, *rest = expression.split()
    total, text = int(first), ""
    for label, operator, term in zip("abcdefghij", rest[0::2], rest[1::2], strict=False):
        total += int(term) if operator == "+" else -int(term)
        if rng.random() < slip:
            total += rng.choice(SLIPS)
        text += f"{label}{operator}{term}={total}"
    return f"{text}#{total}"


def batch(problems: Problems, tokenizer: Any, size: int, slip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [size, T] and labels [size, T], -100 where the model is not trained (prompt, padding)."""
    rows = []
    for _ in range(size):
        prompt, expression, _ = problems.draw()
        completion = worked_solution(expression, problems.rng, slip)
        rows.append((tokenizer(prompt)["input_ids"], [*tokenizer(completion)["input_ids"][1:], EOS]))
    width = max(len(p) + len(c) for p, c in rows)
    ids = torch.full((size, width), PAD)
    labels = torch.full((size, width), -100)
    for i, (p, c) in enumerate(rows):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
    return ids, labels


def train(model: Qwen3ForCausalLM, tokenizer: Any, problems: Problems, args: argparse.Namespace) -> None:
    """Supervised warm start: AdamW, 50 steps of warm-up, cosine to 5 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    began = time.process_time()
    for step in range(args.steps):
        factor = min(1, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        ids, labels = batch(problems, tokenizer, args.batch_size, args.slip)
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            seconds = time.process_time() - began
            print(f"step {step + 1}/{args.steps} loss {loss.item():.4f} cpu {seconds:.0f} s", flush=True)


@torch.no_grad()
def pass_at_1(
    model: Any, tokenizer: Any, problems: Problems, count: int, extract: AnswerExtractor
) -> dict[str, Any]:
    """Share of exact answers at temperature 1, one sample for each of `count` problems; mean length in tokens."""
    drawn = [problems.draw() for _ in range(count)]
    inputs = tokenizer([prompt for prompt, _, _ in drawn], return_tensors="pt", padding=True)
    out = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        top_k=0,
        temperature=1.0,
        max_new_tokens=64,
    )[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    right = [
        problems.dataset.score_answer(extract(t), d[2]) == 1.0 for t, d in zip(texts, drawn, strict=True)
    ]
    share = sum(right) / count
    return {
        "pass@1": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / count), 4),
        "n": count,
        "completion_tokens": round((out != PAD).sum().item() / count, 1),
        "sample": drawn[0][0] + texts[0],
    }


def main() -> None:
    """Pretrain, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ASSET)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--slip", type=float, default=0.12, help="probability that a demonstrated step is wrong"
    )
    parser.add_argument("--eval-problems", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env_config = json.loads((ASSET / "env_config.json").read_text())
    tokenizer, model = make_tokenizer(), make_model(args.seed)
    began, wall = time.process_time(), time.time()
    train(model, tokenizer, Problems(env_config, "train", args.seed), args)
    made = {"cpu_s": round(time.process_time() - began), "wall_s": round(time.time() - wall)}
    model = model.to(torch.bfloat16)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "env_config.json").write_text((ASSET / "env_config.json").read_text())
    extract = AnswerExtractor.from_config(env_config["answer"])
    result = pass_at_1(
        model.float(), tokenizer, Problems(env_config, "eval", args.seed), args.eval_problems, extract
    )
    print(json.dumps({**made, **result, "parameters": model.num_parameters()}, indent=1))


if __name__ == "__main__":
    main()
