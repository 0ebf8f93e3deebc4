"""Directories of registered models are served by stock vLLM, without anything of this project in the process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )

from rllib_llm.engines import make_engine
from rllib_llm.engines.base import SamplingParams
from rllib_llm.models import load_pretrained, load_tokenizer
from rllib_llm.registry.package import Record, serving_environment, write_package
from tests.vllm.cases import DEVICE


def served(directory: Path, prompts: list[list[int]], variables: dict[str, str]) -> list[list[int]]:
    """Greedy tokens of stock vLLM in a process of its own."""
    asked, out = directory / "prompts.json", directory / "answers.json"
    asked.write_text(json.dumps(prompts))
    # transformers imports a top-level module called `kernels`, which the repository's root would offer
    paths = [
        p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not Path(p, "kernels").is_dir()
    ]
    environment = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(paths)}
        | variables
        | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    script = Path(__file__).parent / "stock_vllm.py"
    command = [sys.executable, str(script), str(directory), str(asked), str(out)]
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(out.read_text())
    assert answer["ours"] == []
    return answer["tokens"]


@pytest.mark.parametrize(
    ("policy", "folder"), [("bf16", "hf"), pytest.param("unified-fp8", "fp8", marks=pytest.mark.gpu)]
)
def test_stock_vllm_gives_the_greedy_tokens_of_our_engine(policy: str, folder: str, tmp_path: Path) -> None:
    """All tokens of eight answers of the shipped model, which is trained: its two best tokens are rarely close.

    FP8 needs a GPU: vLLM's block-FP8 kernels for CPUs want AMX (docs/registry.md).
    """
    write_package(load_pretrained("tiny-chain", policy, "train"), tmp_path, Record())
    tokenizer = load_tokenizer("tiny-chain")
    prompts = [tokenizer(f"{n}a+4b-0c+{9 - n}d+7=")["input_ids"] for n in range(1, 9)]
    with make_engine("torch", str(tmp_path / "hf"), policy, device=DEVICE) as engine:
        answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    ours = [a.token_ids.tolist() for (a,) in answers]
    variables = (
        serving_environment(load_pretrained("tiny-chain", policy, "train").policy) if folder == "fp8" else {}
    )
    assert sum(map(len, ours)) > 150
    assert served(tmp_path / folder, prompts, variables) == ours


def test_pyfunc_generates_with_vllm_on_request(tmp_path: Path, ray_for_engines: None) -> None:
    """`engine: vllm` gives the embedded engine's greedy answers, after its weights were compared with the manifest."""
    from rllib_llm.registry.pyfunc import TextGenerator

    write_package(load_pretrained("tiny-chain", "unified-fp8", "train"), tmp_path, Record())
    model = TextGenerator(tmp_path, engine_options={"max_model_len": 128})
    prompts = [f"{n}a+4b-0c+{9 - n}d+7=" for n in range(1, 5)]
    found = {
        name: model.answers(prompts, {"engine": name, "temperature": 0.0, "max_tokens": 40})
        for name in ("torch", "vllm")
    }
    model.close()
    assert found["vllm"] == found["torch"]
    assert [reason for _, reason, _ in found["vllm"]] == ["stop"] * 4
