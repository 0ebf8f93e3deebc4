"""The examples and the README's snippet run as they are printed."""

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rllib_llm.experiment.file import load_experiment

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("rollout.prompts_per_iteration=2", "rollout.group_size=4", "evaluation.interval=null")
SMALL += ("run.resources.cpus_for_trainer=1", "train.warmup_steps=0")


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
    assert (
        namespace["env"] == load_experiment("quickstart").env.config
    )  # the model was pretrained on these prompts
    trials = namespace["analysis"].trials
    assert [trial.status for trial in trials] == ["TERMINATED"] * 2
    shares = {t.last_result["precision_policy"]: t.last_result["mismatch"]["bit_equal_share"] for t in trials}
    assert shares["unified-fp8"] == 1.0
    assert shares["mixed-bf16-fp8"] < 1.0


def test_tune_grid_example(ray_session, tmp_path, monkeypatch):
    """The grid example gives one row per policy: unified's mismatch is exactly zero, mixed's is not."""
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "tune_grid.py"))
    rows = example["main"](["mixed-bf16-fp8", "unified-fp8"], 1, SMALL, f"sqlite:///{tmp_path}/mlflow.db")
    largest = {policy: value for policy, _, value in rows}
    assert largest["unified-fp8"] == 0.0
    assert largest["mixed-bf16-fp8"] > 0.0


def test_tune_asha_example(ray_session, tmp_path, monkeypatch):
    """ASHA ends one of two trials at the first rung and lets the better one run on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    example = runpy.run_path(str(ROOT / "examples" / "tune_asha.py"))
    rows = example["main"](2, 4, "unified-fp8", SMALL, f"sqlite:///{tmp_path}/mlflow.db")
    assert len({lr for lr, _, _ in rows}) == 2
    assert all(1e-6 <= lr <= 1e-3 for lr, _, _ in rows)
    assert rows[0][1] == 4
    assert all(0.0 <= reward <= 1.0 for _, _, reward in rows)


def test_tune_pbt_example(ray_session, tmp_path, monkeypatch):
    """The trial that lagged goes on with the other's weights and varied settings, and MLflow shows the change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    example = runpy.run_path(str(ROOT / "examples" / "tune_pbt.py"))
    store = f"sqlite:///{tmp_path}/mlflow.db"
    rows = example["main"](2, 4, 2, SMALL, store)
    assert len(rows) == 2
    client = MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("pbt").experiment_id])
    changed = [run for run in runs if "config.train.lr" in run.data.tags]
    assert len(changed) == 1
    ended = {f"{lr:.6g}" for lr, _, _ in rows}
    assert f"{float(changed[0].data.tags['config.train.lr']):.6g}" in ended
    steps = client.get_metric_history(changed[0].info.run_id, "config/train/lr")
    assert [point.step for point in steps] == [0, 2]
    assert steps[0].value == float(changed[0].data.params["train.lr"]) != steps[1].value
    used = client.get_metric_history(changed[0].info.run_id, "learners/default_policy/lr")
    assert [point.value for point in used if point.step > 2] == [steps[1].value] * 2


@pytest.mark.ray
def test_tune_resume_example(tmp_path):
    """Killed with SIGKILL after its first checkpoint, the same command finishes both trials in the same MLflow runs."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    call = f"main(__import__('pathlib').Path('exp'), 2, {SMALL!r}, {store!r})"
    code = f"import runpy; print(runpy.run_path({str(ROOT / 'examples' / 'tune_resume.py')!r})[{'main'!r}]"
    code += call.removeprefix("main") + ")"
    arguments = [sys.executable, "-c", code]
    first = subprocess.Popen(arguments, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 1200
    while not list((tmp_path / "exp").glob("*/checkpoint_*/rllib_checkpoint.json")):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(1.0)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {"bf16": 2, "unified-fp8": 2}
    client = MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("resume").experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED"] * 3


@pytest.mark.ray
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
