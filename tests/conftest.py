"""Fixtures shared by all tests, and the environment that every test process and Ray worker runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Set before torch, ray or transformers is imported anywhere: each reads its variable once.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # Ray 2.60 otherwise writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
if not os.path.exists("/dev/nvidiactl"):
    # Before anything imports triton (torch and transformers do): without a GPU kernels run under its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """One local Ray for the whole session (starting it costs 5-8 s); yields the ``ray`` module.

    Eight logical CPUs are declared whatever the machine has: actors of the tests mostly wait for one another, and with
    two CPUs a trial with two env runners and a learner would never be placed.
    """
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()
