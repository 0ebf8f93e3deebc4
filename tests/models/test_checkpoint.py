import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rllib_llm.models import load_pretrained, save_pretrained
from rllib_llm.models.paths import ModelPathError, resolve_model_path, shipped_models
from rllib_llm.models.safetensor_files import INDEX_FILE, SINGLE_FILE, ModelFilesError
from tests.models.cases import CONFIGS, make_model


@pytest.fixture
def directory(tmp_path):
    """A saved tied qwen3 model."""
    return save_pretrained(make_model("qwen3", "bf16"), tmp_path / "model")


def edit(directory, change) -> None:
    """Apply `change` to the dict of tensors of a single-file checkpoint."""
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 100_000], ids=["one-file", "sharded"])
def test_saved_directory_is_read_by_transformers_and_by_us(kind, max_shard_bytes, tmp_path):
    """transformers loads what we save with nothing missing or unexpected and the bf16 values of our masters; we too."""
    model = make_model(kind, "unified-fp8")
    save_pretrained(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / INDEX_FILE).is_file() == (max_shard_bytes == 100_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.bfloat16
    expected = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    back = load_pretrained(tmp_path, "unified-fp8")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name
    for name, parameter in back.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.detach(), expected[name].float()), name


def test_float32_save_keeps_exact_masters(tmp_path):
    """dtype="float32" round-trips every master bit."""
    model = make_model("llama", "bf16")
    back = load_pretrained(save_pretrained(model, tmp_path, dtype="float32"), "bf16")
    ours = dict(model.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in back.named_parameters())


def test_saving_over_a_sharded_directory_leaves_one_consistent_checkpoint(tmp_path):
    """A second save with another number of files does not leave an index that points at the first."""
    save_pretrained(make_model("qwen3", "bf16", seed=1), tmp_path, max_shard_bytes=50_000)
    second = make_model("qwen3", "bf16", seed=2)
    save_pretrained(second, tmp_path)
    back = load_pretrained(tmp_path, "bf16")
    name = "model.layers.1.mlp.up_proj.weight"
    expected = second.get_parameter(name).detach().bfloat16().float()
    assert torch.equal(back.get_parameter(name).detach(), expected)


@pytest.mark.parametrize("policy", ["bf16", "unified-fp8", "mixed-bf16-fp8"])
def test_rollout_side_loads_what_an_export_would_send(policy, directory):
    """A rollout model read from a directory holds the bytes that a train model of it exports."""
    train = load_pretrained(directory, policy)
    rollout = load_pretrained(directory, policy, "rollout")
    held = dict(rollout.named_buffers())
    exported = dict(train.rollout_tensors())
    assert held.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_tokenizer_files_travel_with_the_weights(directory, tmp_path):
    """Saving a loaded model copies tokenizer, template and generation config, and nothing else."""
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "secrets.txt"):
        (directory / name).write_text("{}")
    target = save_pretrained(load_pretrained(directory, "bf16"), tmp_path / "copy")
    names = {path.name for path in target.iterdir()}
    assert names == {
        "config.json",
        SINGLE_FILE,
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }


def test_all_tensor_problems_are_listed(directory):
    """Missing, unexpected and misshapen tensors appear in one message."""

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.embed_tokens.weight"] = torch.zeros(3, 4)

    edit(directory, change)
    with pytest.raises(ModelFilesError) as caught:
        load_pretrained(directory, "bf16")
    message = str(caught.value)
    assert "3 tensor(s)" in message
    assert "model.norm.weight: missing (shape [128])" in message
    assert "model.layers.7.mlp.up_proj.weight: not part of a qwen3 model" in message
    assert "model.embed_tokens.weight: shape [3, 4], the config says [128, 128]" in message


def test_tied_config_accepts_a_repeated_head_but_not_another_one(directory):
    """An lm_head that repeats the embedding loads; one that differs is refused, since it would be ignored."""
    edit(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_pretrained(directory, "bf16")
    edit(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ModelFilesError, match="tie_word_embeddings"):
        load_pretrained(directory, "bf16")


def test_pickled_weights_are_not_read(directory):
    """A directory with only pytorch_model.bin is refused with the reason."""
    (directory / SINGLE_FILE).rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="pickle"):
        load_pretrained(directory, "bf16")


def test_broken_files_are_named(directory):
    """A truncated file, an index that is no JSON, a missing shard, and a shard outside the directory are errors."""
    data = (directory / SINGLE_FILE).read_bytes()
    (directory / SINGLE_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFilesError, match="not a readable safetensors file"):
        load_pretrained(directory, "bf16")
    (directory / SINGLE_FILE).unlink()
    (directory / INDEX_FILE).write_text("nonsense")
    with pytest.raises(ModelFilesError, match="not an index"):
        load_pretrained(directory, "bf16")
    weight_map = {"a": "gone.safetensors", "b": "../config.json"}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFilesError) as caught:
        load_pretrained(directory, "bf16")
    assert "gone.safetensors" in str(caught.value)
    assert "../config.json" in str(caught.value)


def test_rollout_side_cannot_be_saved(directory, tmp_path):
    """Quantised weights are not written as if they were masters."""
    with pytest.raises(ValueError, match="train side"):
        save_pretrained(load_pretrained(directory, "unified-fp8", "rollout"), tmp_path / "x")


def test_paths(directory, tmp_path, monkeypatch):
    """A directory resolves to itself, a shipped name into the package, a local directory shadows a shipped name, and
    anything else is an error that lists what exists."""
    assert resolve_model_path(directory) == directory.resolve()
    for name in shipped_models():
        assert (resolve_model_path(name) / "config.json").is_file()
    monkeypatch.chdir(tmp_path)
    if shipped_models():
        save_pretrained(make_model("qwen3", "bf16"), tmp_path / shipped_models()[0])
        assert resolve_model_path(shipped_models()[0]).parent == tmp_path
    for wrong in ("no-such-model", str(tmp_path), str(directory / "config.json")):
        with pytest.raises(ModelPathError, match="shipped model"):
            resolve_model_path(wrong)
