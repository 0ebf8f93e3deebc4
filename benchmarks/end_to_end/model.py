"""Qwen3 models of several sizes with random weights, and the prompts that they answer."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256, "tie_word_embeddings": True},
    "0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "tie_word_embeddings": True},
    "1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "tie_word_embeddings": True},
    "4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "tie_word_embeddings": True},
    "8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "tie_word_embeddings": False},
    "14b": _QWEN3 | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                     "num_attention_heads": 40, "tie_word_embeddings": False},
}  # fmt: skip
"""The configurations of Qwen/Qwen3-0.6B to -14B (their config.json), and one for a CPU."""


def make_model(shape: str, directory: Path, device: str, context: int) -> None:
    """Write a model with seeded random BF16 weights and the shipped character tokenizer, unless it is there already.

    A sequence ends with the tokenizer's own end, which random weights choose once in 152 000 tokens: but for these,
    answers have their full length, without a minimum that engines would look after. Rows count the tokens there are.
    """
    if (directory / "model.json").is_file():
        return
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    import rllib_llm

    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=context, bos_token_id=0)
    config.eos_token_id = 2  # <eos> of the shipped tokenizer
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer = Path(rllib_llm.__file__).parent / "assets" / "tiny-chain"
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copyfile(file, directory / file.name)
    (directory / "model.json").write_text(json.dumps({"shape": shape, "context": context}))


def prompt_text(characters: int, key: str, index: int) -> str:
    """So many characters, one token each: digits that depend on the key and the index."""
    digits = random.Random(f"{key} {index}")
    return "".join(digits.choice("0123456789") for _ in range(characters - 1)) + "="


class Digits:
    """An environment: random digits to go on from; the reward is a coin that depends on the answer."""

    def __init__(self, config: dict[str, Any], split: str, seed: int) -> None:
        self.characters, self.key = int(config["characters"]), f"{split} {seed}"

    def reset(self, index: int) -> Any:
        """Prompt number ``index``."""
        from rllib_llm.envs import Prompt

        return Prompt(text=prompt_text(self.characters, self.key, index), info={"id": str(index)})

    def step(self, completion: str) -> Any:
        """One answer ends the episode."""
        from rllib_llm.envs import StepResult

        return StepResult(reward=coin(completion), done=True)


def coin(text: str) -> float:
    """0 or 1, equal in all processes."""
    return float(sum(text.encode()) % 2)


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
