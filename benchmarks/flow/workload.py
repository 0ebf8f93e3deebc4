"""What both sides of an on-policy benchmark are asked to do: shapes, prompts, rounds, and when timings are taken."""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

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


def random_weights(model: torch.nn.Module) -> None:
    """Seeded normal weights, norms 1. lm_head is wider, so that the distributions are not flat."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(
                0, 0.04 if "lm_head" in name else 0.02
            )


@dataclass(frozen=True)
class Round:
    """A set of requests: `prompts` random prompts of 1 to `longest` tokens (`even`: all longest), n answers each."""

    name: str
    prompts: int
    longest: int
    n: int = 1
    new_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = True
    seed: int = 1
    even: bool = False
    repeats: int = 1
    """Times the round is run. If several, the first one warms up; the rate is of the others' median."""
    spread: bool = False
    """Answers of a sixteenth of new_tokens to all of them: others begin as they end, so that steps have both."""

    def answer_lengths(self) -> list[int]:
        """Most tokens of each of the prompts x n answers."""
        count = self.prompts * self.n
        if not self.spread:
            return [self.new_tokens] * count
        generator = torch.Generator().manual_seed(9)
        return torch.randint(
            max(1, self.new_tokens // 16), self.new_tokens + 1, (count,), generator=generator
        ).tolist()

    def prompt_ids(self, vocab: int) -> list[list[int]]:
        """Token ids; lengths have quadratic spacing in shuffled order."""
        generator = torch.Generator().manual_seed(8)
        lengths = (torch.linspace(1, self.longest**0.5, self.prompts) ** 2).long().clamp(1, self.longest)
        lengths = lengths[torch.randperm(self.prompts, generator=generator)]
        if self.even:
            lengths = torch.full_like(lengths, self.longest)
        return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths.tolist()]


ROUNDS = {
    r.name: r
    for r in (
        Round("group", 32, 2000, n=4, new_tokens=1024),
        Round("uneven", 512, 2000, new_tokens=512, ignore_eos=False, seed=2),
        Round("truncated", 32, 2000, n=4, new_tokens=512, temperature=0.7, top_k=50, top_p=0.9),
        Round("long", 64, 300, new_tokens=7800, seed=4),
        Round("longest", 32, 200, new_tokens=8192, seed=9),
        Round("long-4k", 32, 200, new_tokens=3800, seed=4),
        Round("medium", 16, 400, n=4, new_tokens=1024, seed=6),
        Round("short", 32, 300, n=4, new_tokens=256, seed=5),
        Round("rate-1", 1, 64, new_tokens=192, even=True, repeats=5),
        Round("rate-64", 64, 64, new_tokens=192, even=True, repeats=5),
        Round("rate-256", 256, 64, new_tokens=192, even=True, repeats=5),
        Round("joining", 600, 64, new_tokens=240, even=True, repeats=3, spread=True),
    )
}


class Turns:
    """Lets several processes of one benchmark set up side by side and then measure one after the other.

    Without a folder there is nobody else. With one, `enter` waits until `parties` processes are ready, at most
    `patience` seconds, and holds the folder's lock while a block runs.
    """

    def __init__(self, folder: str | None, parties: int, patience: float = 420.0) -> None:
        self.folder, self.parties, self.patience = folder, parties, patience
        self.waited = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        directory = Path(self.folder)
        directory.mkdir(parents=True, exist_ok=True)
        if not self.waited:
            (directory / f"ready-{os.getpid()}").touch()
            begin = time.time()
            while len(list(directory.glob("ready-*"))) < self.parties:
                if time.time() - begin > self.patience:
                    print(
                        f"only {len(list(directory.glob('ready-*')))} of {self.parties} became ready",
                        flush=True,
                    )
                    break
                time.sleep(0.2)
            self.waited = True
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        time.sleep(0.5)  # whoever waits comes first, so that engines alternate


def typical(seconds: list[float]) -> float:
    """Median without the first, which warms up."""
    return statistics.median(seconds[1:] or seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", nargs="+", default=["group"], choices=list(ROUNDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", help="folder shared by processes that measure one after the other")
    for name, default in {
        "context": 4096, "sequences": 128, "batched-tokens": 8192, "kv-gib": 24, "packed-tokens": 32768, "parties": 1,
        "scale-down": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")


def chosen_rounds(args: argparse.Namespace) -> list[Round]:
    """The rounds asked for; `--scale-down 16` divides their sizes, for a try on a CPU."""
    from dataclasses import replace

    d = args.scale_down
    return [
        replace(
            r,
            prompts=max(1, r.prompts // d),
            longest=max(8, r.longest // d),
            new_tokens=max(4, r.new_tokens // d),
        )
        for r in (ROUNDS[name] for name in args.rounds)
    ]
