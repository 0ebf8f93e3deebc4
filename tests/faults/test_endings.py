"""Runs that are ended from outside say what is true, end with the right status, and leave no MLflow run RUNNING."""

import os
import signal
import subprocess
import sys
import time

import pytest
from mlflow import MlflowClient

from rllib_llm.cli.interrupt import Interrupt
from rllib_llm.process.ray_head import RayWatch
from tests.cli.test_train import SMALL, command


class Head:
    """A head that is lost once it is told so."""

    what = ""

    def lost(self, patience_s=0.0):
        return self.what


def test_a_lost_head_is_told_once_and_not_before():
    """The watch calls when the head is lost, with what is lost, and never again."""
    told, head = [], Head()
    watch = RayWatch(head, period_s=0.001)
    watch.on_lost = told.append
    time.sleep(0.02)
    assert told == []
    head.what = "raylet ended"
    watch._thread.join(600)
    assert told == ["raylet ended"]


def test_sigterm_promises_no_checkpoint_that_ray_may_be_unable_to_write(capfd):
    """After SIGTERM, which may have gone to Ray too, the text says what holds in both cases."""
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested
    err = capfd.readouterr().err
    assert "then writing a checkpoint" not in err
    assert "last periodic checkpoint" in err


def test_a_signal_before_there_is_anything_to_keep_ends_at_once():
    """While a trial is built no iteration can be finished: the first signal raises KeyboardInterrupt."""
    interrupt = Interrupt()
    interrupt.nothing_to_keep = True
    with interrupt, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


COMMAND_IN_IMPORTS = """
import sys, time
from rllib_llm.cli import main as cli
import importlib
module = importlib.import_module("rllib_llm.cli.main")
def slow(arguments):
    print("ready", flush=True)
    time.sleep(600)
module.commands.add_all = lambda parsers, _: parsers.add_parser("train").set_defaults(run=slow)
sys.exit(cli(["train"]))
"""


def test_sigterm_before_ray_is_status_130_and_one_line():
    """A command that is still importing or reading ends with 130 and one sentence, without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND_IN_IMPORTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "rllib-llm: interrupted\n")


@pytest.mark.ray
def test_sigterm_to_the_whole_job_leaves_killed_runs_and_names_the_checkpoint(tmp_path):
    """`timeout`, a scheduler: Ray gets the signal, too. MLflow says KILLED and the last checkpoint is named; 130."""
    process = subprocess.Popen(
        command("train", "quickstart", *SMALL, "run.iterations=1000", "run.checkpoint_every=1"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("iteration ") and not line.startswith("iteration 1/"):
            break
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 130, "".join(seen) + err
    assert "checkpoint_0" in out
    assert "then writing a checkpoint" not in err
    assert "train --resume" in err
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
    assert {run.info.status for run in runs} == {"KILLED"}
