"""One small model and an engine with its weights, for the tests of a file that change neither."""

from typing import Any

import pytest

from tests.engines.cases import engine_of
from tests.models.cases import make_model


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3", "bf16")


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    return engine_of(model)
