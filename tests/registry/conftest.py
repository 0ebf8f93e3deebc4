"""A real checkpoint of the shipped model, and a store in which it is registered once for all tests of this folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

POLICY = "unified-fp8"


@dataclass(frozen=True)
class Trained:
    """A checkpoint after one training iteration, and what the engine acknowledged to hold at that moment."""

    path: Path
    held: dict[str, str]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, ray_session: Any) -> Trained:
    from rllib_llm import GRPOConfig
    from rllib_llm.experiment.file import load_experiment

    config = (
        GRPOConfig()
        .precision(POLICY)
        .model("tiny-chain")
        .environment("reasoning_gym", env_config=load_experiment("quickstart").env.config)
        .rollout(group_size=4, prompts_per_iteration=2, max_new_tokens=8)
        .training(lr=1e-3)
        .env_runners(num_env_runners=0)
        .debugging(seed=0, log_level="ERROR")
    )
    algo = config.build_algo()
    try:
        algo.train()
        path = algo.save_to_path(str(tmp_path_factory.mktemp("trial") / "checkpoint_000000"))
        [held] = algo.weights.evidence(algo.env_runner_group).held.values()
    finally:
        algo.stop()
    return Trained(Path(path), dict(held))


@dataclass(frozen=True)
class Store:
    """An MLflow store with one run, whose trial wrote the checkpoint, and the model registered from it."""

    uri: str
    run_id: str
    entry: Any

    @property
    def registry(self) -> Any:
        from rllib_llm.registry.mlflow_registry import Registry

        return Registry(self.uri)

    @property
    def client(self) -> Any:
        return self.registry.client

    def root(self) -> Path:
        return self.registry.fetch(self.entry)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, trained: Trained) -> Store:
    from rllib_llm.registry.register import register
    from rllib_llm.tracking.store import MLflowStore, Operation

    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    writer = MLflowStore(uri, "adders")
    tags = {
        "tune.trial_dir": str(trained.path.parent),
        "checkpoint": str(trained.path),
        "git.rllib_llm.commit": "c0ffee",
    }
    writer.apply(Operation("0", "create", {"name": "trial", "tags": tags}))
    for step, reward in ((1, 0.25), (2, 0.5)):
        values = {"env_runners/episode_return_mean": reward, "mismatch/max_abs": 0.0, "unimportant": 1.0}
        writer.apply(Operation("0", "metrics", {"step": step, "time_ms": step, "values": values}))
    columns = {"iteration": [1], "prompt": ["<bos>1+2="], "completion": ["3#3<eos>"], "reward": [1.0]}
    writer.apply(Operation("0", "table", {"file": "samples.json", "columns": columns}))
    writer.apply(Operation("0", "text", {"file": "policy/attestations.json", "text": _attestations()}))
    run_id = writer.run_ids["0"]
    made = register(run_id, "adder", alias="best", tracking_uri=uri)
    return Store(uri, run_id, made.entry)


def _attestations() -> str:
    """As the callback writes them at the start of a run."""
    import json

    from precision_policies import load_policy
    from rllib_llm.models import load_config, resolve_model_path

    policy = load_policy(POLICY)
    plan = policy.resolve(load_config(resolve_model_path("tiny-chain")))
    stated = {"policy_fingerprint": policy.fingerprint, "plan_hash": plan.hash, "scale_format": "fp32"}
    return json.dumps({"train": stated, "rollout/0": stated})


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    """A copy of the registered model's directory, to be damaged."""
    return Path(shutil.copytree(store.root(), tmp_path / "model"))


@pytest.fixture
def registry_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store is the process's default, as for somebody who set MLFLOW_TRACKING_URI."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    return store
