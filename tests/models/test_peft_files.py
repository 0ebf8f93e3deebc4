"""Adapters as PEFT's directories: PEFT reads what we write and the other way round, and both compute alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from precision_policies import AdapterSpec
from rllib_llm.models import PackedBatch, build_model, save_pretrained
from rllib_llm.models.adapters import factors as factors_of
from rllib_llm.models.peft_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftFilesError,
    load_adapter,
    read_spec,
    save_adapter,
)
from tests.edge_cases import assert_same_bits
from tests.models.adapters import adapted_model
from tests.models.cases import CONFIGS, fp32_policy, next_tokens, random_sequences

peft = pytest.importorskip("peft")

CASES = [
    ("qwen3", AdapterSpec(5, 3, ("q_proj", "down_proj"))),
    ("llama", AdapterSpec(16, 2.5, use_rslora=True)),
]


def twin_of(model: Any, directory: Path) -> Any:
    """transformers' model of the same base in fp32, with the adapters of a directory, by PEFT."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=torch.float32)
    plain = build_model(model.config, model.policy, "train")
    plain.initialise(0)
    base.load_state_dict(plain.state_dict(), strict=False)
    base.tie_weights()
    return peft.PeftModel.from_pretrained(base, str(directory), is_trainable=True).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), CASES, ids=str)
def test_peft_computes_the_same_function_and_gradients(kind: str, spec: AdapterSpec, tmp_path: Path) -> None:
    """In fp32: logits within 2e-4 of their largest, gradients of A and B within 1e-3 in norm; under bf16 the logits
    are within 3 % of the largest (BF16 rounding of activations)."""
    model = adapted_model(kind, fp32_policy(), spec)
    twin = twin_of(model, save_adapter(model, tmp_path / "adapter", "somewhere"))
    ids = random_sequences((12,), 120)[0]
    batch = PackedBatch.from_sequences([ids])
    logits = model.logits(model(batch))
    expected = twin(torch.tensor([ids])).logits[0]
    largest = float(expected.detach().abs().max())
    assert float((logits - expected).detach().abs().max()) < 2e-4 * largest
    weights = torch.linspace(-1, 1, len(ids))
    targets = next_tokens(batch)
    (torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0] * weights).sum().backward()
    (torch.log_softmax(expected, -1).gather(1, targets[:, None])[:, 0] * weights).sum().backward()
    named = dict(twin.named_parameters())
    for name, factor in factors_of(model):
        head, _, which = name.rpartition(".")
        theirs = named[f"base_model.model.{head}.{which}.default.weight"].grad
        assert float((factor.weight.grad - theirs).norm()) < 1e-3 * float(theirs.norm()) + 1e-7, name
    half = adapted_model(kind, "bf16", spec)
    with torch.no_grad():
        assert float((half.logits(half(batch)) - expected).abs().max()) < 0.03 * largest


@pytest.mark.slow
def test_a_directory_that_peft_wrote_is_read(tmp_path: Path) -> None:
    """rank, alpha, rsLoRA, places and all values of a PEFT model, and what is written again is the same."""
    model = build_model(CONFIGS["qwen3"](), "bf16", "train")
    model.initialise(0)
    model.config.architectures = ["Qwen3ForCausalLM"]
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    config = peft.LoraConfig(
        r=6, lora_alpha=9, use_rslora=True, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "theirs")
    spec = read_spec(tmp_path / "theirs")
    assert (spec.rank, spec.alpha, spec.use_rslora) == (6, 9.0, True)
    assert spec.targets == ("q_proj", "up_proj")
    own = build_model(CONFIGS["qwen3"](), "bf16", "train", adapter=spec)
    load_adapter(own, tmp_path / "theirs")
    save_adapter(own, tmp_path / "ours", "x")
    theirs, ours = (load_file(tmp_path / which / WEIGHTS_FILE) for which in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert_same_bits(ours[name], theirs[name], name)
    assert read_spec(tmp_path / "ours") == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"lora_dropout": 0.05}, "lora_dropout = 0.05"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "only 'LORA'"),
        ({"target_modules": ".*q_proj"}, "a pattern"),
        ({"target_modules": None}, "target"),
        ({"r": 0}, "adapter.rank"),
        ({"r": "8"}, "adapter.rank"),
        ({"lora_alpha": None}, "adapter.alpha"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict, message: str, tmp_path: Path) -> None:
    """Each key of a LoraConfig that would change the function is named."""
    save_adapter(adapted_model("qwen3", "bf16"), tmp_path, "x")
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(PeftFilesError, match=message.replace("(", r"\(")):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"LORA"', "{}"])
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    """No JSON, no object, no LoRA: one error with the file."""
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(PeftFilesError, match=CONFIG_FILE):
        read_spec(tmp_path)
    with pytest.raises(PeftFilesError, match=CONFIG_FILE):
        read_spec(tmp_path / "nowhere")


def test_tensors_that_do_not_fit_leave_the_model_as_it_was(tmp_path: Path) -> None:
    """Missing, unknown, misshapen, NaN: all in one error, and nothing is loaded."""
    model = adapted_model("qwen3", "bf16")
    save_adapter(model, tmp_path, "x")
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    names = sorted(tensors)
    bad = {name: tensors[name] for name in names[1:]}
    bad["base_model.model.model.norm.lora_A.weight"] = torch.zeros(8, 8)
    bad[names[1]] = torch.zeros(3, 3)
    bad[names[2]] = torch.full_like(tensors[names[2]], float("nan"))
    save_file(bad, tmp_path / WEIGHTS_FILE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(PeftFilesError) as caught:
        load_adapter(model, tmp_path)
    for word in (names[0], "model.norm.lora_A", names[1], names[2]):
        assert word in str(caught.value)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), before[name], name)
    with pytest.raises(PeftFilesError, match="rank 8"):
        load_adapter(adapted_model("qwen3", "bf16", AdapterSpec(4, 4)), tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"junk")
    with pytest.raises(PeftFilesError, match="not a readable"):
        load_adapter(model, tmp_path)


def test_a_model_with_adapters_is_not_written_as_a_whole(tmp_path: Path) -> None:
    """Its base has no masters: save_pretrained says what to use."""
    with pytest.raises(ValueError, match="save_adapter"):
        save_pretrained(adapted_model("qwen3", "bf16"), tmp_path)
