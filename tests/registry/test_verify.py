"""`rllib-llm models verify`: a registered model is what was registered, or every difference is told."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rllib_llm.cli.main import main
from rllib_llm.models import load_pretrained
from rllib_llm.registry.manifest import Manifest, hash_files
from rllib_llm.registry.package import Record, write_package
from rllib_llm.registry.verify import verify_package


def flip(file, tensor):
    """Change one bit of one tensor in a safetensors file."""
    held = load_file(file)
    held[tensor].view(torch.uint8).reshape(-1)[7] ^= 1
    save_file(held, file, metadata={"format": "pt"})


def reseal(root):
    """Rewrite the manifest so that its file hashes fit again, as somebody would who wants to hide a change."""
    manifest = dataclasses.replace(Manifest.read(root), files=hash_files(root))
    return {"manifest.sha256": manifest.write(root)}


def test_a_registered_model_is_verified(registry_environment, capsys):
    """Exit status 0, with what was compared: every file, every tensor of the rollout made again."""
    assert main(["models", "verify", "adder@best"]) == 0
    shown = capsys.readouterr().out
    assert "74 of the rollout made again from the masters" in shown
    assert "bit for bit, with fp8/" in shown


def test_every_kind_of_damage_is_told_in_one_message(store, copy):
    """A changed code, a missing file, a foreign file and another policy are found at once."""
    flip(copy / "fp8" / "model.safetensors", "model.layers.0.mlp.up_proj.weight")
    (copy / "metrics.json").unlink()
    (copy / "hf" / "modeling_evil.py").write_text("import os")
    policy = copy / "policy.yaml"
    policy.write_text(policy.read_text().replace("scale_format: fp32", "scale_format: ue8m0"))
    text = "\n".join(verify_package(copy, store.entry.tags).violations)
    assert "metrics.json: missing" in text
    assert "hf/modeling_evil.py: not in the manifest" in text
    assert "fp8/model.safetensors: sha256" in text
    assert "policy.yaml: fingerprint" in text
    assert "model.layers.0.mlp.up_proj.weight: " in text


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.up_proj.weight_scale_inv", "model.norm.weight"])
def test_fp8_bytes_are_compared_with_the_masters_not_only_hashed(store, copy, tensor):
    """One changed bit is found although the manifest was made to fit, and the registry's tag as well."""
    flip(copy / "fp8" / "model.safetensors", tensor)
    tags = store.entry.tags | reseal(copy)
    [violation] = verify_package(copy, tags).violations
    assert violation.startswith(f"{tensor}: 1 bytes of its ")


def test_files_of_another_shape_are_violations_not_crashes(store, copy):
    """Valid JSON of the wrong type in every file that is read: all of it is listed."""
    (copy / "attestations.json").write_text('{"rollout": 3}')
    (copy / "fp8" / "config.json").write_text("[]")
    found = "\n".join(verify_package(copy, store.entry.tags).violations)
    assert "attestations.json: rollout must be an object" in found
    assert "fp8/config.json: cannot be read: a list" in found
    (copy / "hf" / "config.json").write_text("[]")
    found = "\n".join(verify_package(copy, store.entry.tags).violations)
    assert "hf/config.json: cannot be resolved under the policy: a list" in found


def test_a_manifest_of_another_shape_is_refused_with_all_that_is_wrong(store, copy):
    """Folders outside the model, and entries of another type, are told together."""
    data = json.loads((copy / "manifest.json").read_text())
    data |= {"masters": "../elsewhere", "fp8": 3, "files": {"README.md": "abc"}, "tensors": {"a": 1}}
    (copy / "manifest.json").write_text(json.dumps(data))
    [found] = verify_package(copy, store.entry.tags).violations
    for part in ("masters = '../elsewhere'", "fp8 must be", "files must map", "tensors must map"):
        assert part in found


def test_changed_masters_are_found_by_the_hashes_of_the_rollout(store, copy):
    """Masters and FP8 bytes changed together still are not what the run's engine held."""
    name = "model.norm.weight"
    for folder in ("hf", "fp8"):
        flip(copy / folder / "model.safetensors", name)
    [violation] = verify_package(copy, store.entry.tags | reseal(copy)).violations
    assert violation.startswith(f"{name}: made again from the masters it has another hash")


def test_a_manifest_that_was_rewritten_does_not_pass(store, copy):
    """The registry's tag, which does not lie beside the files, has the hash of the manifest."""
    (copy / "README.md").write_text("nicer")
    reseal(copy)
    [violation] = verify_package(copy, store.entry.tags).violations
    assert "manifest.sha256" in violation


def test_a_changed_config_is_found(store, copy):
    """config.json decides the plan; the block size in the FP8 directory's decides how it is read."""
    file = copy / "fp8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    file.write_text(json.dumps(config))
    masters = copy / "hf" / "config.json"
    masters.write_text(json.dumps(json.loads(masters.read_text()) | {"tie_word_embeddings": False}))
    text = "\n".join(verify_package(copy, store.entry.tags | reseal(copy)).violations)
    assert "fp8/config.json: quantization_config is not that of the plan" in text
    assert "lm_head.weight" in text  # which an untied model would have


def test_an_attestation_of_another_policy_is_found(store, copy):
    """A side that stated another fingerprint did not compute with this policy."""
    file = copy / "attestations.json"
    sides = json.loads(file.read_text())
    assert sides.keys() == {"train", "rollout/0", "export"}
    sides["rollout/0"]["policy_fingerprint"] = "0" * 64
    file.write_text(json.dumps(sides))
    [violation] = verify_package(copy, store.entry.tags | reseal(copy)).violations
    assert violation.startswith("attestations.json: rollout/0 attested policy_fingerprint 0000")


def test_exit_statuses_tell_damage_from_wrong_questions(store, tmp_path, capsys, monkeypatch):
    """3 for a model that differs, 2 for one that does not exist, with those that do."""
    uri = ["--tracking-uri", store.uri]
    assert main(["models", "verify", "adder@worst", *uri]) == 2
    assert "Versions of 'adder': 1 (best)" in capsys.readouterr().err
    assert main(["models", "verify", "addder/1", *uri]) == 2
    assert "Did you mean 'adder'?" in capsys.readouterr().err
    assert main(["models", "verify", "adder", *uri]) == 2
    assert main(["models", "verify", "adder/99999999999999999999", *uri]) == 2
    capsys.readouterr()
    assert main(["models", "verify", "adder@best", "--tracking-uri", "http://127.0.0.1:1"]) == 2
    assert "the MLflow store http://127.0.0.1:1 did not answer" in capsys.readouterr().err
    assert main(["models", "verify", "adder@best", "--tracking-uri", f"sqlite:///{tmp_path}/none.db"]) == 2
    assert not (tmp_path / "none.db").exists()
    readme = store.root() / "README.md"
    text = readme.read_text()
    try:
        readme.write_text(text + "!")
        assert main(["models", "verify", "adder@best", *uri]) == 3
        assert "1 violation\n  1. README.md" in capsys.readouterr().err
        assert main(["models", "export", "adder@best", str(tmp_path / "out"), *uri]) == 2
        assert not (tmp_path / "out").exists()
    finally:
        readme.write_text(text)


@pytest.mark.parametrize(
    "policy", ["bf16", "fp16", "mixed-bf16-fp8", "unified-fp8-ue8m0", "unified-fp8-fp16-backward"]
)
def test_packages_of_every_kind_of_policy_verify(policy, tmp_path):
    """Masters are exported in the compute dtype, from which every policy makes its rollout again, FP8 or not."""
    model = load_pretrained("tiny-chain", policy, "train")
    with torch.no_grad():  # values that bfloat16 cannot hold, as after training
        model.model.norm.weight += 1e-4
    manifest, digest = write_package(model, tmp_path, Record())
    tags = {
        "manifest.sha256": digest,
        "policy.fingerprint": model.policy.fingerprint,
        "policy.plan_hash": model.plan.hash,
    }
    verdict = verify_package(tmp_path, tags)
    assert verdict.violations == ()
    assert verdict.rederived == len(manifest.tensors)
    assert (manifest.fp8 is not None) == (model.policy.linear.rollout_forward == "fp8")
