"""Which versions of vLLM are taken, and what is said about those that were not run. vLLM itself is not needed."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from rllib_llm.engines.vllm import compat


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compat, "_version", lambda name: request.param if name == "vllm" else None)


@pytest.mark.parametrize("installed", ["0.25.1", "0.33.0", "1.0.0"], indirect=True)
def test_a_version_outside_the_range_is_refused(installed: None) -> None:
    """The error has the version, the range and a way out."""
    with pytest.raises(
        compat.UnsupportedVLLMError, match=r"vllm .* supports 0.26 to 0.32(?s:.*)engine='torch'"
    ):
        compat.vllm_version()


@pytest.mark.parametrize(
    ("installed", "silent_on"),
    [("0.26.0", "cuda"), ("0.27.1", "cpu"), ("0.30.0+cpu", "cpu"), ("0.32.0", "cpu")],
    indirect=["installed"],
)
def test_a_version_that_was_not_run_on_a_device_is_named_in_the_log(
    installed: None, silent_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Silence where tests/vllm passed; elsewhere a warning with version, device and what was run."""
    with caplog.at_level(logging.WARNING):
        compat.warn_if_not_run(silent_on)
        assert caplog.messages == []
        other = {"cuda": "cpu", "cpu": "cuda"}[silent_on]
        compat.warn_if_not_run(other)
    [message] = caplog.messages
    assert compat.vllm_version() in message
    assert f"on {other}" in message
    assert compat.RUN[other][0] in message


def test_every_version_of_the_range_was_run_somewhere() -> None:
    """A range that is widened needs a run."""
    low, high = compat.SUPPORTED
    run = {version for versions in compat.RUN.values() for version in versions}
    assert run == {f"0.{minor}" for minor in range(low[1], high[1] + 1)}
