"""The shipped model tiny-chain, and the script that made it."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from rllib_llm.envs import make_env

pytestmark = pytest.mark.slow

ASSET = Path(str(files("rllib_llm.assets"))) / "tiny-chain"
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_tiny_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSET)


def test_every_printable_character_is_one_token(tokenizer):
    """Text survives encoding and decoding; BOS is put in front; other characters are <unk>."""
    text = "".join(map(chr, range(32, 127))) + "\nab  c"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.bos_token_id, tokenizer.unk_token_id]
    assert len(tokenizer) == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1a+2="}], tokenize=False)
    assert tokenizer(chat, add_special_tokens=False)["input_ids"] == tokenizer("1a+2=")["input_ids"]


def test_shipped_tokenizer_is_what_the_script_makes(script, tmp_path):
    """The tokenizer in the package was not edited by hand."""
    script.make_tokenizer().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(
        (ASSET / "tokenizer.json").read_text()
    )


def test_model_has_the_promised_shape():
    """BF16, Qwen3, every dimension a multiple of the FP8 block, below 4 MB."""
    from safetensors import safe_open

    config = json.loads((ASSET / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    head = config["head_dim"]
    widths = [config["hidden_size"], config["intermediate_size"], config["vocab_size"]]
    widths += [head * config["num_attention_heads"], head * config["num_key_value_heads"]]
    assert all(width % 128 == 0 for width in widths)
    with safe_open(ASSET / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert (ASSET / "model.safetensors").stat().st_size < 4e6


def test_shipped_model_is_right_about_half_of_the_time(tokenizer):
    """At temperature 1 its pass@1 is the README's, within four standard errors of 128 samples; RL can improve it."""
    import torch
    from transformers import AutoModelForCausalLM

    stated = float(re.search(r"\*\*([\d.]+) ±", (ASSET / "README.md").read_text()).group(1))
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    factory = make_env("reasoning_gym", json.loads((ASSET / "env_config.json").read_text()), "eval", seed=0)
    envs = [factory() for _ in range(128)]
    batch = tokenizer([env.reset(i).text for i, env in enumerate(envs)], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    output = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=True, top_k=0, max_new_tokens=64
    )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    share = sum(env.step(text).reward for env, text in zip(envs, texts, strict=True)) / len(envs)
    assert abs(share - stated) < 4 * (stated * (1 - stated) / len(envs)) ** 0.5


def test_demonstrations_are_right_without_slips_and_wrong_with_them(script):
    """slip=0 ends in the true answer; slip=1 is wrong in every single step."""
    rng = random.Random(0)
    assert script.worked_solution("3 + 8 - 2 - 9", rng, slip=0.0) == "a+8=11b-2=9c-9=0#0"
    slipped = script.worked_solution("3 + 8 - 2", rng, slip=1.0)
    first, second = map(int, re.findall(r"=(-?\d+)", slipped))
    assert first != 11
    assert second != first - 2


def test_script_runs_from_nothing_to_a_loadable_model(tmp_path):
    """Two steps of training, saved and evaluated, in a fresh process."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--steps", "2", "--batch-size", "2"]
    result = subprocess.run(
        [*command, "--eval-problems", "2"], capture_output=True, text=True, timeout=1200, check=True
    )
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert report["n"] == 2
    assert report["parameters"] == 1_608_448
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "env_config.json",
        "generation_config.json",
    }
