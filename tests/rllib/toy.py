"""A task and a model small enough to train in seconds: repeat the digit before the equals sign."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rllib_llm.envs.protocol import Prompt, StepResult

ALPHABET = "0123456789=+?#"
EOS, PAD = "<eos>", "<pad>"
PAIRS = ("00", "11", "22", "33")  # never encoded, only sampled: encode(decode(ids)) is not ids
VOCABULARY = [*ALPHABET, EOS, PAD, *PAIRS]


class CopyDigit:
    """ "7=" wants "7" and the end. Reward 0.6 for the digit, 0.4 for stopping after it."""

    def __init__(self, config: dict[str, Any], split: str = "train", seed: int = 0):
        self.config, self.split, self.seed = config, split, seed

    def reset(self, index: int) -> Prompt:
        if index in self.config.get("broken_problems", ()):
            raise KeyError(f"no problem {index}")
        digits = self.config.get("digits", 4)
        self.index, self.digit = index, str((index * 7 + self.seed + (self.split == "eval")) % digits)
        return Prompt(text="?" * (index % 3) + f"{self.digit}=", info={"id": f"{self.split}-{index}"})

    def step(self, completion: str) -> StepResult:
        if delay := self.config.get("delay_s"):
            time.sleep(delay)
        while (gate := self.config.get("wait_for")) and not gate.exists():
            time.sleep(0.01)
        if self.index in self.config.get("broken_rewards", ()):
            raise ZeroDivisionError("reward function")
        right = completion[:1] == self.digit
        alone = len(completion) == 1
        rewards = {"digit": float(right), "stop": float(alone)}
        reward = 0.6 * right + 0.3 * (right and alone) + 0.1 * (self.digit in completion)
        return StepResult(reward, True, rewards=rewards, info={"solved": right and alone})


class AskTwice(CopyDigit):
    """Two turns: after the first answer the environment writes "+", and only the second answer is paid."""

    def reset(self, index: int) -> Prompt:
        self.turn = 0
        return super().reset(index)

    def step(self, completion: str) -> StepResult:
        self.turn += 1
        if self.turn == 1:
            return StepResult(0.0, False, observation=f"+{self.digit}=")
        return super().step(completion)


class Curriculum:
    """A factory with a state: it counts the environments it made."""

    num_problems = None

    def __init__(self, config: dict[str, Any], split: str = "train", seed: int = 0):
        self.config, self.split, self.seed, self.level = config, split, seed, 0

    def __call__(self) -> CopyDigit:
        self.level += 1
        return CopyDigit(self.config, self.split, self.seed)

    def get_state(self) -> dict[str, Any]:
        return {"level": self.level}

    def set_state(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


def make_model(directory: Path, seed: int = 0, hidden: int = 128) -> Path:
    """A random Qwen3-style model (all sizes multiples of 128) with a character tokenizer, in Hugging Face format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    from precision_policies import load_policy
    from rllib_llm.models import build_model, save_pretrained

    directory.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.08,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=None,
    )
    model = build_model(config, load_policy("bf16"), "train")
    model.initialise(seed)
    save_pretrained(model, directory)
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=EOS, pad_token=PAD).save_pretrained(
        directory
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY.index(EOS)}))
    return directory
