"""The toy model, and a config that trains on it in the test's own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = str(Path(__file__).resolve().parents[2])
# Ray's workers import tests.rllib.toy too: they inherit PYTHONPATH from the raylet, not sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.rllib.toy import make_model

    return str(make_model(tmp_path_factory.mktemp("toy") / "model"))


@pytest.fixture
def toy_config(toy_model: str) -> Callable[..., Any]:
    """Function making a small GRPOConfig on the toy model and task; keyword arguments go to `.rollout`."""
    from rllib_llm import GRPOConfig
    from tests.rllib.toy import CopyDigit

    def make(
        policy: str = "unified-fp8", env: Any = CopyDigit, env_config: dict | None = None, **rollout: Any
    ) -> Any:
        settings = {"group_size": 4, "prompts_per_iteration": 4, "max_new_tokens": 4} | rollout
        return (
            GRPOConfig()
            .precision(policy)
            .model(toy_model)
            .environment(env, env_config=env_config or {})
            .rollout(**settings)
            .training(lr=1e-3)
            .debugging(seed=0, log_level="ERROR")
        )

    return make


@pytest.fixture
def build(toy_config: Callable[..., Any], ray_session: Any) -> Iterator[Callable[..., Any]]:
    """Function building an algorithm from a config, or from arguments of `toy_config`; stopped after the test."""
    built = []

    def make(config: Any = None, **kwargs: Any) -> Any:
        algo = (config or toy_config(**kwargs)).build_algo()
        built.append(algo)
        return algo

    yield make
    for algo in built:
        algo.stop()
