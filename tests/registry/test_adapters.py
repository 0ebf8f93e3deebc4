"""A run with adapters in the registry: merged, with what the merge loses, and the adapters beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precision_policies import AdapterSpec
from rllib_llm.cli.main import main
from rllib_llm.models import PackedBatch, load_pretrained
from rllib_llm.models.peft_files import load_adapter, read_spec
from rllib_llm.on_disk.checkpoint import CheckpointError
from rllib_llm.registry.masters import read_checkpoint
from rllib_llm.registry.merged import load_merged
from rllib_llm.registry.register import register
from rllib_llm.registry.verify import verify_package
from tests.edge_cases import assert_same_bits

SPEC = AdapterSpec(4, 8)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, ray_session: Any) -> Path:
    """A checkpoint of the shipped model after one iteration with adapters."""
    from rllib_llm import GRPOConfig
    from rllib_llm.experiment.file import load_experiment

    config = (
        GRPOConfig()
        .precision("unified-fp8")
        .model("tiny-chain", adapter={"rank": SPEC.rank, "alpha": SPEC.alpha, "path": None})
        .environment("reasoning_gym", env_config=load_experiment("quickstart").env.config)
        .rollout(group_size=4, prompts_per_iteration=2, max_new_tokens=8)
        .training(
            lr=1e-2, kl_coeff=0.01, entropy_coeff=0.01
        )  # an entropy has a gradient whatever the rewards are
        .env_runners(num_env_runners=0)
        .debugging(seed=0, log_level="ERROR")
    )
    algo = config.build_algo()
    try:
        for _ in range(2):
            result = algo.train()
            assert result["mismatch"]["max_abs"] == 0.0
        path = algo.save_to_path(str(tmp_path_factory.mktemp("trial") / "checkpoint_000000"))
        digest = algo.learner_files.digest()
        twin = config.copy(copy_frozen=False).build_algo()
        try:
            twin.restore_from_path(path)
            assert twin.learner_files.digest() == digest
            algo.train()
            twin.train()
            assert twin.learner_files.digest() == algo.learner_files.digest() != digest
        finally:
            twin.stop()
    finally:
        algo.stop()
    return Path(path)


@pytest.mark.slow
def test_a_checkpoint_of_adapters_holds_only_these(adapted: Path) -> None:
    """Weights and moments are of A and B; the base is named by its hash, and another one is refused."""
    checkpoint = read_checkpoint(adapted)
    assert checkpoint.adapter == SPEC
    model = load_pretrained("tiny-chain", "unified-fp8", adapter=SPEC)
    trained = sum(p.numel() for p in model.parameters())
    [weights] = (adapted / "learner_group").rglob("model.safetensors")
    assert 4 * trained < weights.stat().st_size < 4 * trained + 20_000
    with pytest.raises(CheckpointError, match="were trained on weights"):
        load_merged(type(checkpoint)(**{**vars(checkpoint), "base_hash": "0" * 64}))


@pytest.mark.slow
def test_a_registered_model_is_merged_and_has_its_adapters(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It verifies; the export as adapter, loaded on the base, is the trained function; the shares lost are reported."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    made = register(str(adapted), "adder", alias="best", tracking_uri=uri)
    report = made.merge
    assert report is not None
    assert report.updated > 0
    assert report.lost_in_fp8 is not None
    assert 0 < report.lost_in_compute_dtype < report.lost_in_fp8 <= 1
    assert made.entry.tags["base_hash"] == made.checkpoint.base_hash
    assert made.manifest.lineage["merge"]["lost_in_fp8"] == report.lost_in_fp8
    from rllib_llm.registry.mlflow_registry import Registry

    verdict = verify_package(Registry(uri).fetch(made.entry), made.entry.tags)
    assert verdict.violations == ()
    assert main(["models", "export", "adder@best", str(tmp_path / "peft"), "--format", "adapter"]) == 0
    assert "PEFT adapter" in capsys.readouterr().out
    assert read_spec(tmp_path / "peft").scale == SPEC.scale
    trained = load_pretrained("tiny-chain", "unified-fp8", adapter=SPEC)
    load_adapter(trained, tmp_path / "peft")
    values = load_merged(made.checkpoint).values
    for name, module, _ in trained.masters():
        assert_same_bits(module.master("weight"), values[name.removesuffix(".weight")], name)
    batch = PackedBatch.from_sequences([[3, 4, 5, 6, 7, 8]])
    merged = load_pretrained(made.manifest.masters and Registry(uri).fetch(made.entry) / "hf", "unified-fp8")
    with torch.no_grad():
        one, other = (m.logits(m(batch)) for m in (trained, merged))
    assert not torch.equal(one, other)
    assert float((one - other).abs().max()) < 0.5 * float(one.abs().max())


@pytest.mark.slow
def test_a_run_that_trains_all_weights_does_not_restore_adapters(adapted: Path, ray_session: Any) -> None:
    """And the other way round: the error names model.adapter."""
    from rllib_llm.algorithm.adapter_checkpoints import refuse_other_adapter
    from rllib_llm.on_disk.checkpoint import read_metadata
    from rllib_llm.settings.groups import AdapterSettings, ModelSettings

    saved = read_metadata(str(adapted))
    for adapter in (None, AdapterSettings(rank=8), AdapterSettings(rank=4, alpha=9.0)):
        with pytest.raises(CheckpointError, match=r"model\.adapter"):
            refuse_other_adapter(saved, ModelSettings(adapter=adapter), True, saved["base_hash"], "x")
    right = ModelSettings(path="tiny-chain", adapter=AdapterSettings(rank=4, alpha=8.0))
    refuse_other_adapter(saved, right, True, saved["base_hash"], "x")
    with pytest.raises(CheckpointError, match="give the model"):
        refuse_other_adapter(saved, right, True, "0" * 64, "x")
    refuse_other_adapter(saved, right, False, "0" * 64, "x")
    with pytest.raises(CheckpointError, match=r"model\.adapter"):
        refuse_other_adapter({}, right, True, None, "x")
