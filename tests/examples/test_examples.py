"""The examples and the README's snippet run as they are printed."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def readme_snippets():
    """The Python blocks of the README, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)


def test_readme_snippet_runs_as_printed(ray_session, tmp_path, monkeypatch):
    """The first Python block of the README has at most ten lines and trains; its two policies give two trials."""
    snippet = readme_snippets()[0]
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # Tune's results go to ~/ray_results
    namespace: dict = {}
    exec(compile(snippet, "README.md", "exec"), namespace)
    trials = namespace["analysis"].trials
    assert [trial.status for trial in trials] == ["TERMINATED"] * 2
    shares = {t.last_result["precision_policy"]: t.last_result["mismatch"]["bit_equal_share"] for t in trials}
    assert shares["unified-fp8"] == 1.0
    assert shares["mixed-bf16-fp8"] < 1.0


def test_tune_grid_example(ray_session, tmp_path, monkeypatch):
    """The grid example gives one row per policy: unified's mismatch is exactly zero, mixed's is not."""
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "tune_grid.py"))
    rows = example["main"](["mixed-bf16-fp8", "unified-fp8"], 1, f"sqlite:///{tmp_path}/mlflow.db")
    largest = {policy: value for policy, _, value in rows}
    assert largest["unified-fp8"] == 0.0
    assert largest["mixed-bf16-fp8"] > 0.0


def test_own_environment_example(monkeypatch):
    """The example with an environment of one's own trains without Ray actors and pays between 0 and 1."""
    monkeypatch.chdir(ROOT)
    example = runpy.run_path(str(ROOT / "examples" / "own_environment.py"))
    rewards = example["main"](1)
    assert len(rewards) == 1
    assert 0.0 <= rewards[0] <= 1.0


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_it_is_called(path):
    """Each example's docstring shows its command."""
    assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")


def test_readme_links_and_commands_exist():
    """Every relative link of the README leads to a file, and every `rllib-llm` command in it parses."""
    from rllib_llm.cli.main import build_parser

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    commands = re.findall(r"^(?:\.venv/bin/)?rllib-llm ([^#\n]+)", text, flags=re.M)
    commands += re.findall(r"`rllib-llm ([^`]+)`", text)
    assert len(commands) >= 6
    for command in commands:
        build_parser().parse_args(command.split())
