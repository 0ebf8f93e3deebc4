"""A registered model is sampled from under its own policy, or the difference is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_llm import GRPOConfig
from rllib_llm.cli.main import main
from rllib_llm.engines import make_engine
from rllib_llm.engines.base import SamplingParams
from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.file import load_experiment
from rllib_llm.models import resolve_model_path
from rllib_llm.models.paths import ModelPathError
from rllib_llm.on_disk.owner import OWNER_FILE, OtherPolicyError, OwnerFileError, owner_of
from rllib_llm.registry.errors import RegistryError
from rllib_llm.registry.reference import parse_reference


def test_an_engine_under_another_policy_is_refused_with_the_diff(registry_environment):
    """Every difference is a line with its consequence; the same policy under another name is not another policy."""
    with pytest.raises(OtherPolicyError) as error:
        make_engine("torch", "models:/adder@best", "bf16")
    assert "linear.rollout_forward = 'bf16': rollout weights: e4m3 128×128 → bf16" in str(error.value)
    assert "allow_other_policy=True" in str(error.value)
    renamed = {"extends": "unified-fp8", "name": "mine"}
    make_engine("torch", "models:/adder@best", renamed).close()


def test_the_refusal_can_be_overridden_explicitly(registry_environment):
    """With the permission, the engine samples under the other policy."""
    with make_engine("torch", "models:/adder@best", "bf16", allow_other_policy=True) as engine:
        assert engine.attest().policy_fingerprint != owner_of(resolve_model_path("models:/adder@best"))
        [[answer]] = engine.generate([[1, 22]], SamplingParams(max_tokens=3, temperature=0))
        assert len(answer.token_ids) > 0


def test_an_exported_directory_keeps_its_policy(store, tmp_path, capsys):
    """The rule travels with the files: a copy of the masters elsewhere is refused as well."""
    target = tmp_path / "served"
    arguments = ["models", "export", "adder@best", str(target), "--tracking-uri", store.uri]
    assert main([*arguments, "--format", "hf"]) == 0
    assert f"vllm serve {target} --dtype bfloat16" in capsys.readouterr().out
    with pytest.raises(OtherPolicyError):
        make_engine("torch", str(target), "mixed-bf16-fp8")
    assert main([*arguments, "--format", "hf"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_export_is_whole_or_not_there(store, tmp_path, capsys, monkeypatch):
    """A copy that breaks off leaves nothing behind, and a place that cannot be written is told, not raised."""
    command = ["models", "export", "adder@best", "--tracking-uri", store.uri]
    (tmp_path / "file").touch()
    assert main([*command, str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err

    def half(source, target, **_):
        Path(target).mkdir()
        (Path(target) / "config.json").touch()
        raise OSError("no space left")

    monkeypatch.setattr("shutil.copytree", half)
    assert main([*command, str(tmp_path / "deep" / "served")]) == 2
    assert list((tmp_path / "deep").iterdir()) == []


def test_exporting_fp8_prints_how_stock_vllm_keeps_the_bytes(store, tmp_path, capsys):
    """By default the FP8 directory, with the variables without which vLLM would quantise the weights again."""
    assert main(["models", "export", "adder@best", str(tmp_path / "fp8"), "--tracking-uri", store.uri]) == 0
    shown = capsys.readouterr().out
    assert "(fp8)" in shown
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in shown
    assert "quantization_config" in json.loads((tmp_path / "fp8" / "config.json").read_text())


def test_an_experiment_starts_from_a_registered_model(store):
    """`model=models:/adder@best` resolves in the experiment's store, pinned to the version, then to a directory."""
    overrides = ["model=models:/adder@best", f"tracking.uri={store.uri}"]
    experiment = load_experiment("quickstart", overrides)
    assert experiment.pinned().model.path == "models:/adder/1"
    path = experiment.to_grpo_config().model["path"]
    assert Path(path) == store.root() / "hf"
    assert resolve_model_path(path) == Path(path)


def test_an_experiment_under_another_policy_is_refused_once(store):
    """The violation is in the list of problems, in the words of the file, unless the change is allowed."""
    overrides = ["model=models:/adder@best", f"tracking.uri={store.uri}", "precision=bf16"]
    with pytest.raises(ExperimentError) as error:
        load_experiment("quickstart", overrides).to_grpo_config()
    [problem] = error.value.problems
    assert problem.startswith("model.path: ")
    assert "linear.rollout_forward" in problem
    assert "precision.allow_precision_change = true" in problem
    allowed = load_experiment("quickstart", [*overrides, "precision.allow_precision_change=true"])
    assert allowed.to_grpo_config().model["path"].endswith("hf")


def test_an_experiment_with_an_unknown_registered_model_says_so_once(store):
    """One problem, naming the versions that exist, and no second one about the same path."""
    overrides = ["model=models:/adder@gone", f"tracking.uri={store.uri}", "train.lr=-1"]
    with pytest.raises(ExperimentError) as error:
        load_experiment("quickstart", overrides).to_grpo_config()
    about_model = [p for p in error.value.problems if "models:/adder@gone" in p]
    assert len(about_model) == 1
    assert len(error.value.problems) == 2
    assert "Versions of 'adder': 1 (best)" in about_model[0]


def test_a_grpo_config_pins_the_directory(registry_environment):
    """From Python, validate() replaces the reference by the directory that workers load."""
    config = GRPOConfig().precision("unified-fp8").model("models:/adder@best")
    config.validate()
    assert config.model["path"] == str(registry_environment.root() / "hf")
    with pytest.raises(ValueError, match=r"linear\.train_forward"):
        GRPOConfig().precision("mixed-bf16-fp8").model("models:/adder@best").validate()


def test_an_owner_file_that_was_edited_is_not_believed(copy):
    """Naming another policy in it does not give the directory away: the fingerprint no longer fits."""
    file = copy / "hf" / OWNER_FILE
    file.write_text(file.read_text().replace('"scale_format": "fp32"', '"scale_format": "ue8m0"'))
    with pytest.raises(OwnerFileError, match="the file was changed"):
        make_engine("torch", str(copy / "hf"), "unified-fp8-ue8m0")


def test_references_are_read_back_as_written():
    """NAME@ALIAS and NAME/VERSION, with and without the scheme; nothing else."""
    for text in ("models:/a b@x", "models:/a/3"):
        assert str(parse_reference(text)) == text
        assert parse_reference(text.removeprefix("models:/")) == parse_reference(text)
    for wrong in ("", "a@", "@b", "a/b", "a/1/2", "a@b@c", "models://a/1", "/tmp/x"):
        with pytest.raises(RegistryError):
            parse_reference(wrong)


def test_a_registered_model_without_a_store_is_an_error_of_its_own(tmp_path, monkeypatch):
    """Where there is no store the message says where it was looked for, and none is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises((RegistryError, ModelPathError), match="no MLflow store at"):
        resolve_model_path("models:/adder@best")
    assert list(tmp_path.iterdir()) == []
