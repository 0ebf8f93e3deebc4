"""One Ray and one engine for each xdist worker: vLLM takes half a minute or more to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllib_llm.sync.export import export_weights
from tests.vllm.cases import DEVICE, ragged_config, random_learner, start

# Ray's workers import tests.rllib.toy too: they inherit PYTHONPATH, not sys.path.
_ROOT = str(Path(__file__).resolve().parents[2])
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def ray_for_engines() -> Iterator[None]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def qwen3(ray_for_engines: None) -> Iterator[tuple[Any, Any]]:
    """(learner, engine) under unified-fp8, the engine with the learner's weights; chunked prefill on a GPU."""
    config = ragged_config("qwen3")
    model = random_learner(config, "unified-fp8")
    chunked = {"max_num_batched_tokens": 64} if DEVICE == "cuda" else {}
    engine = start(config, "unified-fp8", **chunked)
    engine.update_weights(export_weights(model, 1))
    yield model, engine
    engine.close()
