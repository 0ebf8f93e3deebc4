"""A terminal that closes ends a run as Ctrl-C does: with a checkpoint."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from rllib_llm.cli.interrupt import Interrupt
from rllib_llm.on_disk.directories import checkpoints
from rllib_llm.tracking.history import read_history
from tests.cli.test_train import SMALL, command


@pytest.fixture(autouse=True)
def hangups():
    """Function that sends SIGHUP to this process. Tests that run under nohup, too, begin with the handler of a shell's
    jobs, which their children inherit; the one before is put back.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda: os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_asks_for_a_checkpoint_however_often_it_comes(hangups, capfd):
    """Shells repeat the kernel's SIGHUP, which is no second Ctrl-C; a SIGTERM after it is, and stops at once."""
    with Interrupt() as interrupt:
        hangups()
        assert interrupt.requested
        hangups()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.count("then writing a checkpoint") == 1


def test_an_ignored_hangup_stays_ignored(hangups):
    """Under nohup a run goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        hangups()
        assert not interrupt.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


PIPED = """
import os, signal, sys
from rllib_llm.cli.interrupt import Interrupt
with Interrupt() as interrupt:
    print("ready", file=sys.stderr, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on", file=sys.stderr, flush=True)
sys.exit(7 if interrupt.requested else 1)
"""


@pytest.mark.parametrize("reader_stays", [False, True])
def test_a_pipe_without_reader_is_left(reader_stays):
    """`2>&1 | tee log`: tee ends with the terminal, and what is written afterwards raises nothing. One that stays (the
    signal was for the run alone) gets everything."""
    process = subprocess.Popen(
        [sys.executable, "-c", PIPED], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "ready\n"
    if not reader_stays:
        process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    if reader_stays:
        rest = process.stderr.read()
        assert "writing a checkpoint" in rest
        assert rest.endswith("goes on\n")
    assert process.wait(600) == 7


@pytest.mark.ray
def test_a_closed_terminal_leaves_a_checkpoint(tmp_path):
    """The run and Ray's processes get SIGHUP, and every write to the terminal fails: status and checkpoint as ever."""
    ours, theirs = pty.openpty()
    run = ["setsid", "--ctty", "--wait", *command("train", "quickstart", *SMALL, "run.iterations=1000")]
    process = subprocess.Popen(run, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"1/1000" not in seen:
        seen += os.read(ours, 4096)
    os.close(ours)  # the kernel tells the session's leader, and a shell tells all of its jobs' processes
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(1200) == 130
    (directory,) = (tmp_path / "results").iterdir()
    assert len(checkpoints(directory)) == 1
    assert 1 <= len(read_history(directory)) < 1000
