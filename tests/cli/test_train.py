"""`rllib-llm train` as a user runs it: to its end, interrupted and resumed, evaluated, failing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rllib_llm.cli import main
from rllib_llm.on_disk.directories import find_checkpoint, only_here
from rllib_llm.tracking.history import read_history

EVALUATED = "evaluation/env_runners/episode_return_mean"
EVALUATED_AT_START = "evaluation_at_start/env_runners/episode_return_mean"
pytestmark = pytest.mark.ray

SMALL = [
    "rollout.group_size=2",
    "rollout.prompts_per_iteration=2",
    "rollout.max_new_tokens=8",
    "evaluation.prompts=4",
    "tracking.uri=sqlite:///mlflow.db",
]


def command(*arguments):
    return [sys.executable, "-c", "import sys; from rllib_llm.cli import main; sys.exit(main())", *arguments]


def interrupt_after(process, pattern):
    """Read stderr until a line matches, then send Ctrl-C to the whole process group, as a terminal does."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if re.search(pattern, line):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest_out, rest_err = process.communicate(timeout=1200)
    return rest_out, "".join(seen) + rest_err


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """(directory of the experiment, stdout, stderr, exit status) of a run that got Ctrl-C after its first iteration."""
    place = tmp_path_factory.mktemp("interrupted")
    process = subprocess.Popen(
        command(
            *("train", "quickstart", *SMALL),
            *("run.iterations=1000", "run.checkpoint_every=1000", "evaluation.interval=1000"),
        ),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = interrupt_after(process, r"^iteration 1/")
    (directory,) = (place / "results").iterdir()
    return directory, out, err, process.returncode


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_resume(interrupted):
    """The first Ctrl-C ends the run after its iteration with status 130, a checkpoint, and the command to resume."""
    directory, out, err, status = interrupted
    assert status == 130, err
    assert "finishing this iteration, then writing a checkpoint" in err
    assert f"train --resume {directory}" in err
    assert re.search(r"result +interrupted after \d+ iterations", out)
    assert re.search(r"checkpoint +/.*/checkpoint_\d+", out)
    assert "MLflow run" in out


def test_held_out_reward_is_measured_at_both_ends(interrupted):
    """A run that is interrupted long before its first evaluation has one of before training and one of its end."""
    directory, out, *_ = interrupted
    history = read_history(directory)
    assert [EVALUATED_AT_START in row for row in history] == [True] + [False] * (len(history) - 1)
    assert [EVALUATED in row for row in history] == [False] * (len(history) - 1) + [True]
    assert re.search(rf"held-out reward +[\d.]+ → [\d.]+ \(before training → iteration {len(history)}\)", out)
    assert len(history) >= 10 or "too few to tell whether it learns" in out


def test_resume_goes_on_where_it_stopped(ray_session, interrupted, capsys, monkeypatch):
    """A resumed run continues iteration count, curve and MLflow run, and ends with status 0."""
    directory, *_ = interrupted
    monkeypatch.chdir(directory.parent.parent)
    before = read_history(directory)
    total = len(before) + 3
    overrides = [f"run.iterations={total}", "evaluation.interval=2"]
    assert main(["train", "--resume", str(directory), *overrides]) == 0
    iterations = [row["training_iteration"] for row in read_history(directory)]
    assert iterations == list(range(1, total + 1))
    evaluated = [
        row["training_iteration"] for row in read_history(directory)[len(before) :] if EVALUATED in row
    ]
    assert evaluated == [i for i in range(len(before) + 1, total + 1) if i % 2 == 0 or i == total], (
        "no evaluation is reported twice, and the last iteration has one"
    )
    assert not any(EVALUATED_AT_START in row for row in read_history(directory)[len(before) :])
    record = json.loads((directory / "tracking.json").read_text())
    client = MlflowClient(tracking_uri=record["tracking_uri"])
    curve = client.get_metric_history(record["run_ids"]["0"], "mismatch/max_abs")
    assert [metric.step for metric in curve] == iterations
    assert {metric.value for metric in curve} == {0.0}, "unified-fp8 promises a mismatch of exactly zero"
    assert "finished after" in capsys.readouterr().out


def test_a_finished_run_is_not_resumed(interrupted, capsys):
    """Resuming a run that has all its iterations is refused, with the command that trains longer."""
    directory, *_ = interrupted
    done = len(read_history(directory))
    assert main(["train", "--resume", str(directory), f"run.iterations={done}"]) == 2
    assert f"run.iterations={2 * done}" in capsys.readouterr().err


def test_a_run_under_way_is_not_resumed_beside_itself(interrupted, capsys):
    """Two processes in one directory would mix their curves and checkpoints; the second is refused, nothing changes."""
    directory, *_ = interrupted
    before = {p: p.read_bytes() for p in (directory / "experiment.yaml", directory / "tracking.json")}
    with only_here(directory):
        assert main(["train", "--resume", str(directory), "run.iterations=999"]) == 2
    assert "another process is at work here" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before


def test_resume_under_another_policy_is_refused(interrupted, capsys):
    """A checkpoint does not go on under another precision policy; the error says what differs."""
    directory, *_ = interrupted
    assert main(["train", "--resume", str(directory), "precision=bf16"]) == 2
    assert "was written under policy 'unified-fp8'" in capsys.readouterr().err


def test_eval_reports_a_checkpoint(interrupted, capsys):
    """`eval` of an experiment directory takes its furthest checkpoint and prints held-out reward and policy."""
    directory, *_ = interrupted
    assert main(["eval", str(directory), "--prompts", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"mean reward +[\d.]+", out)
    assert re.search(r"answers +3\b", out)
    assert "unified-fp8" in out


@pytest.mark.parametrize("file", ["algorithm_state.json", "learner_group/learner/state.json"])
def test_a_checkpoint_of_changed_bytes_is_not_evaluated(interrupted, file, tmp_path, capsys):
    """A file of the right size and other content ends with status 2, and says that the checkpoint is damaged."""
    checkpoint = shutil.copytree(find_checkpoint(interrupted[0]), tmp_path / "checkpoint_000000")
    (tmp_path / "experiment.yaml").write_bytes((interrupted[0] / "experiment.yaml").read_bytes())
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(b"\xd7" * len(content))
    assert main(["eval", str(checkpoint), "--prompts", "2"]) == 2
    assert f"{file} has other bytes than were written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["train", "quickstart"], ["compare", "quickstart", "--policies", "bf16"]]
)
def test_a_trial_that_can_never_be_placed_is_refused(ray_session, command, capsys, tmp_path, monkeypatch):
    """Asking for GPUs that are not there ends at once with status 2 instead of waiting for ever; nothing is left."""
    monkeypatch.chdir(tmp_path)
    overrides = [
        "run.resources.gpus_per_env_runner=64",
        "run.resources.num_env_runners=1",
        "tracking.enabled=false",
    ]
    assert main([*command, *overrides]) == 2
    assert re.search(r"can never be placed:\s+1\. GPU: 64 asked for, 0 there", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_resume_changes_nothing(ray_session, interrupted, capsys):
    """Overrides under which a run cannot go on do not become part of its experiment.yaml."""
    directory, *_ = interrupted
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    overrides = ["run.iterations=2000", "run.resources.gpus_per_learner=64", "run.resources.num_learners=1"]
    assert main(["train", "--resume", str(directory), *overrides]) == 2
    assert "can never be placed" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_results_are_where_the_config_says(interrupted):
    """The experiment directory holds the resolved config, the curve and the record of its MLflow runs."""
    directory, *_ = interrupted
    assert directory.name.startswith("quickstart-unified-fp8-")
    assert {"experiment.yaml", "metrics.jsonl", "tracking.json"} <= {
        path.name for path in Path(directory).iterdir()
    }


def test_the_mlflow_run_tells_what_ran(interrupted):
    """The trial's run holds the policy, the plan, the attestations of both sides and sampled answers."""
    directory, *_ = interrupted
    record = json.loads((directory / "tracking.json").read_text())
    client, run_id = MlflowClient(tracking_uri=record["tracking_uri"]), record["run_ids"]["0"]
    files = {file.path for folder in ("", "policy") for file in client.list_artifacts(run_id, folder)}
    assert {"samples.json", "policy/policy.yaml", "policy/plan.json", "policy/attestations.json"} <= files
    attestations = json.loads(Path(client.download_artifacts(run_id, "policy/attestations.json")).read_text())
    assert "train" in attestations
    assert any(side.startswith("rollout") for side in attestations)
    table = json.loads(Path(client.download_artifacts(run_id, "samples.json")).read_text())
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert re.search(r"\d+a[+-]\d+", first["prompt"])
    assert first["iteration"] == 1
    assert set(record["run_ids"]) == {"0"}, "one trial is one run"
    run = client.get_run(run_id)
    assert run.data.params["precision.policy"] == "unified-fp8"
    assert client.get_metric_history(run_id, "at_a_glance/held_out_reward")[0].step == 0
    assert {used.dataset.name for used in run.inputs.dataset_inputs} == {"reasoning_gym chain_sum"}
    assert "of `tiny-chain` on `reasoning_gym chain_sum`" in run.data.tags["mlflow.note.content"]
