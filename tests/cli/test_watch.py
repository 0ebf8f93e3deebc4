"""`rllib-llm watch`, `rllib-llm completion`, and settings given in the form of options."""

import json
import subprocess

import pytest

from rllib_llm.cli import main
from rllib_llm.cli.watch import sparkline, view


def row(iteration, **more):
    return {
        "training_iteration": float(iteration),
        "time_this_iter_s": 10.0,
        "unix_time": 1000.0 + iteration,
        "env_runners/episode_return_mean": iteration / 10,
        "env_runners/tokens_per_s": 812.0,
        "mismatch/k3": 0.0,
        **more,
    }


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([1.0], "▁"),
        ([0.0, 0.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_curve_is_a_line_of_bars(values, line):
    """The smallest value is the lowest bar, the largest the highest; what does not change is a low line."""
    assert sparkline(values) == line


@pytest.mark.parametrize("length", [1, 47, 48, 49, 1000])
def test_a_long_curve_stays_narrow(length):
    """Of many values each bar is the mean of a stretch: no line is longer than 48 characters."""
    line = sparkline([float(i) for i in range(length)])
    assert len(line) == min(length, 48)
    assert list(line) == sorted(line)


def test_the_view_shows_what_a_run_does():
    """Iteration and time left, curves with their last value, held-out rewards and speed stand below one another."""
    at_start = {"evaluation_at_start/env_runners/episode_return_mean": 0.25}
    text = view([row(1, **at_start), row(2), row(3)], 40, now=1063.0)
    assert "iteration        3 of 40, about 6 min left" in text
    assert "reward           ▁▅█  0.3  (smallest 0.1, largest 0.3)" in text
    assert "held-out reward  0.250 (before training, the only evaluation)" in text
    assert "812 tok/s" in text
    assert "last result      60 s ago" in text
    assert "left" not in view([row(40)], 40, now=1063.0)
    assert "of ?" in view([row(1)], None, now=1063.0)
    assert view([], 40, now=0.0) == "no iteration yet: the first one takes longest"


def test_watching_ends_with_the_run(tmp_path, capsys):
    """A run that has all its iterations is shown once; a directory that is none is refused."""
    (tmp_path / "experiment.yaml").write_text("run: {iterations: 2}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in (1, 2)))
    assert main(["watch", str(tmp_path)]) == 0
    assert "2 of 2" in capsys.readouterr().out
    (tmp_path / "experiment.yaml").write_text("[")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "2 of ?" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "is no experiment directory" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell, capsys):
    """The script names each command; bash accepts its own."""
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in ("train", "watch", "localise", "doctor"))
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_no_command_prints_the_help(capsys):
    """`rllib-llm` alone is a question, not an error."""
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--precision", "bf16"], "write precision=bf16"),
        (["--precision=bf16"], "write precision=bf16"),
        (["--train.lr", "2e-4"], "write train.lr=2e-4"),
        (["--run.max-minutes", "5"], "write run.max_minutes=5"),
        (["--model"], "write model=VALUE"),
    ],
)
def test_a_setting_as_an_option_says_how_it_is_written(given, meant, capsys):
    """Who writes a setting as an option learns the form that is understood, with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart", *given])
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err
