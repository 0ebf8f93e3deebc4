"""What `rllib-llm models register` makes of a run or a checkpoint."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil
from pathlib import Path

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from precision_policies import load_policy
from rllib_llm.cli.main import main
from rllib_llm.on_disk.checkpoint import CheckpointError, write_manifest
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.manifest import Manifest
from rllib_llm.registry.masters import load_masters, read_checkpoint
from rllib_llm.registry.register import register
from rllib_llm.registry.source import find_source

WEIGHTS = "learner_group/learner/rl_module/default_policy/model.safetensors"


def test_the_hashes_in_the_manifest_are_those_that_the_engine_acknowledged(store, trained):
    """What is registered is, tensor by tensor, what the rollout engine held when the checkpoint was written."""
    assert Manifest.read(store.root()).tensors == trained.held


def test_the_masters_are_a_hugging_face_model(store, trained):
    """transformers loads `hf/`, and its parameters are the learner's masters rounded to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(store.root() / "hf", dtype=torch.bfloat16)
    masters = load_file(trained.path / WEIGHTS)
    found = dict(model.named_parameters())
    assert masters["model.norm.weight"].dtype == torch.float32
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], masters[name].bfloat16()) for name in masters)


def test_the_fp8_directory_is_in_the_standard_format(store, trained):
    """Read as DeepSeek-V3's checkpoints define it, codes times scales of 128x128 blocks are the masters within e4m3."""
    folder = store.root() / "fp8"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    held, masters = load_file(folder / "model.safetensors"), load_file(trained.path / WEIGHTS)
    scaled = [name for name in held if name.endswith("_scale_inv")]
    assert len(scaled) == 4 * 7  # every projection of every layer
    for scales in scaled:
        name = scales.removesuffix("_scale_inv")
        assert held[name].dtype == torch.float8_e4m3fn
        assert held[scales].dtype == torch.float32
        blocks = held[scales].repeat_interleave(128, 0).repeat_interleave(128, 1)
        master = masters[name].bfloat16().float()
        error = (held[name].float() * blocks - master).abs()
        # half a unit in the last of e4m3's three mantissa bits, or of its smallest subnormal 2^-9
        assert (error <= (master.abs() * 2**-4).clamp(min=2**-10 * float(blocks.max()))).all()
    assert torch.equal(held["model.norm.weight"], masters["model.norm.weight"].bfloat16())


def test_the_model_page_says_where_the_model_comes_from(store, trained):
    """Tags, description, alias, metrics at the checkpoint's iteration, signature and input example are there."""
    version = store.client.get_model_version("adder", store.entry.version)
    assert version.tags["policy.name"] == "unified-fp8"
    assert version.tags["policy.fingerprint"] == load_policy("unified-fp8").fingerprint
    assert version.tags["source.run_id"] == version.run_id == store.run_id
    assert version.tags["source.checkpoint"] == f"{trained.path.parent.name}/{trained.path.name}"
    assert version.tags["base_model"] == "tiny-chain"
    assert version.tags["git.rllib_llm.commit"] == "c0ffee"
    assert version.tags["training_iteration"] == "1"
    assert store.entry.aliases == ("best",)
    assert "| precision policy | `unified-fp8`" in version.description
    assert "| mean reward (training) | 0.25 |" in version.description  # not the 0.5 of the second iteration
    model_id = version.source.removeprefix("models:/")
    logged = store.client.get_logged_model(model_id)
    assert {m.key: m.value for m in logged.metrics} == {
        "env_runners/episode_return_mean": 0.25,
        "mismatch/max_abs": 0.0,
    }
    artefacts = store.root().parents[1]
    assert json.loads((artefacts / "input_example.json").read_text())["inputs"] == ["1+2="]
    run = store.client.get_run(store.run_id)
    assert run.info.status == "RUNNING"  # registering does not end a run that goes on
    assert [m.model_id for m in run.outputs.model_outputs] == [model_id]


def test_nothing_of_the_model_or_the_checkpoint_is_pickled(store, trained, tmp_path, monkeypatch):
    """The artefacts hold no pickle, and registering a checkpoint does not read the pickle that RLlib insists on."""
    suffixes = {path.suffix for path in store.root().parents[1].rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".yaml", ".txt", ".md", ".safetensors", ".jinja", ""}

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "load", refuse)
        monkeypatch.setattr(module, "loads", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    model = load_masters(read_checkpoint(trained.path))
    assert torch.equal(
        model.model.norm.weight.detach(), load_file(trained.path / WEIGHTS)["model.norm.weight"]
    )


def test_a_path_finds_the_run_that_wrote_it(store, trained):
    """A checkpoint, its trial's directory and the run id name the same checkpoint and run."""
    for source in (str(trained.path), str(trained.path.parent), store.run_id):
        found = find_source(source, store.client)
        assert (found.checkpoint, found.run_id) == (trained.path, store.run_id)


def test_an_alias_moves_to_the_new_version(store, trained, capsys):
    """Registering again under an alias makes a version, and the alias names that one."""
    arguments = ["--name", "mover", "--alias", "best", "--tracking-uri", store.uri]
    assert main(["models", "register", str(trained.path), *arguments]) == 0
    assert main(["models", "register", str(trained.path), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "models:/mover@best (version 2)" in shown
    assert "rllib-llm models verify mover@best" in shown
    assert main(["models", "list", "mover", "--tracking-uri", store.uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["mover", "1", "-"], ["mover", "2", "best"]]


def test_an_experiment_with_several_trials_is_not_guessed_from(store, trained, tmp_path, capsys):
    """Of a parent run, or a directory, with two trials, the error lists both."""
    client = store.client
    experiment = client.get_run(store.run_id).info.experiment_id
    parent = client.create_run(experiment).info.run_id
    children = [
        client.create_run(experiment, tags={"mlflow.parentRunId": parent, "checkpoint": "/gone"}).info.run_id
        for _ in range(2)
    ]
    with pytest.raises(RegistryError, match="2 trials") as error:
        find_source(parent, client)
    assert all(child in str(error.value) for child in children)
    with pytest.raises(RegistryError, match="not on this machine"):
        find_source(children[0], client)
    for trial in ("a", "b"):
        shutil.copytree(trained.path, tmp_path / trial / "checkpoint_000000")
    assert main(["models", "register", str(tmp_path), "--name", "x", "--tracking-uri", store.uri]) == 2
    assert "2 trials" in capsys.readouterr().err


def test_a_resumed_run_is_one_run_with_its_furthest_checkpoint(store, trained, tmp_path):
    """Each resume is a trial of its own beside the first; the record in the directory says in which MLflow run."""
    (tmp_path / "experiment.yaml").write_text("model: tiny-chain\n")
    (tmp_path / "tracking.json").write_text(json.dumps({"run_ids": {"0": store.run_id}}))
    for seconds, trial in enumerate(("z_first", "a_resumed")):
        copy = shutil.copytree(trained.path, tmp_path / trial / "checkpoint_000000")
        os.utime(copy, (seconds, seconds))
    found = find_source(str(tmp_path), store.client)
    assert found.checkpoint == tmp_path / "a_resumed" / "checkpoint_000000"
    assert found.run_id == store.run_id
    first = find_source(str(tmp_path / "z_first"), store.client)
    assert (first.checkpoint.parent.name, first.run_id) == ("z_first", store.run_id)
    (tmp_path / "tracking.json").write_text("{")
    with pytest.raises(RegistryError, match="holds no MLflow run ids"):
        find_source(str(tmp_path), store.client)


def test_a_name_that_cannot_be_read_back_is_refused_with_the_alias(store, trained):
    """Both problems in one message, before anything is exported."""
    with pytest.raises(RegistryError, match=r"--name 'a/b'.*--alias 'latest'"):
        register(str(trained.path), "a/b", alias="latest", tracking_uri=store.uri)
    with pytest.raises(RegistryError, match=r"--name 'a/b'.*no such path /nowhere"):
        register("/nowhere", "a/b", tracking_uri="sqlite:////nowhere/none.db")


def test_a_source_that_is_neither_path_nor_run_is_refused(store, capsys):
    """The message says what was looked for."""
    assert main(["models", "register", "nope", "--name", "x", "--tracking-uri", store.uri]) == 2
    assert "not an MLflow run id" in capsys.readouterr().err
    assert main(["models", "register", "0" * 32, "--name", "x", "--tracking-uri", store.uri]) == 2
    assert "0" * 32 in capsys.readouterr().err


def test_a_checkpoint_says_all_that_it_lacks(trained, tmp_path):
    """A base model that is gone and a policy that was edited are one message; --base-model mends the first."""
    path = Path(shutil.copytree(trained.path, tmp_path / "checkpoint_000000"))
    file = path / "rllib_checkpoint.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps(metadata | {"rllib_llm": metadata["rllib_llm"] | {"model": "/gone"}}))
    write_manifest(str(path))
    assert read_checkpoint(path, "tiny-chain").base_model == "tiny-chain"
    metadata["rllib_llm"]["policy"]["quantisation"]["scale_format"] = "ue8m0"
    file.write_text(json.dumps(metadata | {"rllib_llm": metadata["rllib_llm"] | {"model": "/gone"}}))
    write_manifest(str(path))
    with pytest.raises(CheckpointError, match="2 problem") as error:
        read_checkpoint(path)
    assert "the metadata was changed" in str(error.value)
    assert "--base-model DIR" in str(error.value)


def test_weights_that_do_not_fit_the_base_model_are_refused(trained, tmp_path):
    """Missing, unknown, misshapen and rounded tensors are listed together."""
    path = Path(shutil.copytree(trained.path, tmp_path / "checkpoint_000000"))
    tensors = load_file(path / WEIGHTS)
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    rounded = "model.layers.0.mlp.down_proj.weight"
    tensors[rounded] = tensors[rounded].bfloat16()
    save_file(tensors, path / WEIGHTS)
    write_manifest(str(path))
    with pytest.raises(CheckpointError) as error:
        load_masters(read_checkpoint(path))
    for part in ("model.norm.weight: missing", "extra: not part of", "[2, 2]", f"{rounded}: torch.bfloat16"):
        assert part in str(error.value)


def test_a_model_trained_from_a_registered_one_names_it(store, trained, tmp_path):
    """The lineage has the name and version of the base, not the directory that workers were handed."""
    path = Path(shutil.copytree(trained.path, tmp_path / "checkpoint_000000"))
    file = path / "rllib_checkpoint.json"
    metadata = json.loads(file.read_text())
    metadata["rllib_llm"]["model"] = str(store.root() / "hf")
    file.write_text(json.dumps(metadata))
    write_manifest(str(path))
    made = register(str(path), "second", tracking_uri=store.uri)
    assert made.entry.tags["base_model"] == "models:/adder/1"
    assert made.source.run_id is None  # the copy lies in no trial's directory


@pytest.mark.parametrize(
    ("folder", "name"),
    [("models/base", "base"), ("hub/models--Acme--Tiny-1B/snapshots/0123abcd", "Acme/Tiny-1B")],
)
def test_nothing_of_this_machine_or_its_user_leaves_with_a_model(
    store, trained, tmp_path, monkeypatch, folder, name
):
    """No path, user, host or token is in the artefacts, in texts and tags of the version, or in the logged model."""
    home = tmp_path / "jane.doe"
    monkeypatch.setenv("HF_TOKEN", "hf_jane.doe")
    for variable in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(variable, "jane.doe")
    monkeypatch.setattr("platform.node", lambda: "jane.doe-laptop")
    monkeypatch.setattr("socket.gethostname", lambda: "jane.doe-laptop")
    base = Path(shutil.copytree(store.root() / "hf", home / folder))
    tokenizer = base / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"name_or_path": str(base)}))
    path = Path(shutil.copytree(trained.path, home / "runs" / "adder" / "checkpoint_000001"))
    made = register(str(path), f"clean-{base.name}", tracking_uri=store.uri, base_model=str(base))
    assert made.entry.tags["base_model"] == name
    assert made.entry.tags["source.checkpoint"] == "adder/checkpoint_000001"
    version = store.client.get_model_version(made.entry.name, made.entry.version)
    logged = store.client.get_logged_model(version.source.removeprefix("models:/"))
    said = [version.description, *version.tags.items(), *logged.tags.items(), *logged.params.items()]
    assert not [text for text in map(str, said) if "jane.doe" in text]
    files = [p for p in Path(logged.artifact_location.removeprefix("file://")).rglob("*") if p.is_file()]
    assert {"MLmodel", "model.safetensors", "config.json"} <= {p.name for p in files}
    assert not [p for p in files if b"jane.doe" in p.read_bytes() or str(tmp_path).encode() in p.read_bytes()]


def test_models_of_other_kinds_are_counted_not_shown(store, capsys):
    """A registry is shared: a version that is not ours is left out of the list, and refused by name."""
    store.client.create_registered_model("forest")
    store.client.create_model_version("forest", "/somewhere")
    assert main(["models", "list", "forest", "--tracking-uri", store.uri]) == 0
    assert "1 version(s) of other kinds of models are not shown" in capsys.readouterr().out
    assert main(["models", "verify", "forest/1", "--tracking-uri", store.uri]) == 2
    assert "was not made by rllib-llm models register" in capsys.readouterr().err


def test_an_upload_that_breaks_off_leaves_no_version(store, trained, monkeypatch):
    """The error is the store's own; the logged model is marked as failed, and there is nothing to load by name."""
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModelStatus

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", full)
    with pytest.raises(OSError, match="no space left"):
        register(str(trained.path), "broken", tracking_uri=store.uri)
    monkeypatch.undo()
    with pytest.raises(RegistryError, match="broken/1 is not in"):
        store.registry.find("broken/1")
    experiment = store.client.get_run(store.run_id).info.experiment_id
    [logged] = store.client.search_logged_models([experiment], "name = 'broken'")
    assert logged.status == LoggedModelStatus.FAILED
