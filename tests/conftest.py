"""Fixtures shared by all tests, and the environment that every test process and Ray worker runs in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import random_examples

# Set before torch, ray or transformers is imported anywhere: each reads its variable once.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # Ray 2.60 otherwise writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_prestart_worker_first_driver": "0",  # a start of Ray costs 6 s of CPU instead of 9
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


random_examples.load_profile()

# Files whose tests start Ray, in their own process or in a child. Each xdist worker has a Ray of its own: with all Ray
# files in one worker, the other was idle for half of the time.
RAY_FILES = (
    "tests/rllib/",
    "tests/registry/",
    "tests/cli/test_hangup.py",
    "tests/cli/test_train.py",
    "tests/compare/test_compare_command.py",
    "tests/engines/test_vllm_actor.py",
    "tests/examples/",
    "tests/faults/",
    "tests/tracking/test_callback.py",
    "tests/vllm/",
)
_RAY_FIXTURES = {"ray_session", "ray_for_engines"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use Ray's fixture with ``ray``; skip those marked ``gpu`` where torch sees no CUDA device."""
    for item in items:
        if _RAY_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")
        if item.get_closest_marker("ray") and not item.nodeid.startswith(RAY_FILES):
            raise pytest.UsageError(
                f"{item.nodeid} starts Ray: add its file to RAY_FILES of tests/conftest.py"
            )
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _starts_no_ray_unsaid(request: pytest.FixtureRequest) -> Iterator[None]:
    """A Ray that a test starts by the way has the CPUs of this machine, and later tests would depend on them."""
    ray = sys.modules.get("ray")
    before = ray is not None and ray.is_initialized()
    yield
    ray = sys.modules.get("ray")
    if before or ray is None or request.node.get_closest_marker("ray") or not ray.is_initialized():
        return
    ray.shutdown()
    pytest.fail("starts Ray without the fixture ray_session or the marker ray")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but what killed a worker is not run again."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            # xdist 3.8 hands the test that killed the worker to the next one, until eight workers are dead.
            for unit in self.assigned_work[node].values():
                for nodeid, completed in unit.items():
                    if not completed:
                        unit[nodeid] = True
                        super().remove_node(node)
                        return nodeid
            return super().remove_node(node)

    return Scheduler(config, log)


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
