"""What a reader of the console sees: the closing table and the status line, from known histories."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios

import pytest

from rllib_llm.cli.interrupt import Interrupt, RunStopper
from rllib_llm.cli.progress import ProgressCallback, span, status_text, time_left
from rllib_llm.cli.summary import closing_table, reward_text
from rllib_llm.tracking.history import HistoryCallback, read_history


def row(iteration, reward, largest=0.0, equal=1.0):
    return {
        "training_iteration": iteration,
        "time_this_iter_s": 2.0,
        "env_runners/episode_return_mean": reward,
        "env_runners/tokens_per_s": 4000.0,
        "learners/default_policy/num_tokens": 1000.0,
        "mismatch/k3": largest / 10,
        "mismatch/mean_abs": largest / 5,
        "mismatch/max_abs": largest,
        "mismatch/bit_equal_share": equal,
    }


def table(history):
    return closing_table(
        history,
        policy="p",
        fingerprint="f" * 64,
        run_id="r1",
        tracking="sqlite:///x",
        checkpoint="/c",
        status="finished",
    )


def test_reward_is_first_iteration_to_mean_of_the_last_five():
    """The table's two rewards are those of the first iteration and the mean of the last five."""
    history = [row(i, i / 10) for i in range(1, 11)]
    assert reward_text(history).startswith("0.100 → 0.800 (first iteration → mean of the last 5; best 1.000)")


def test_table_shows_means_and_extremes():
    """Mismatch is shown as mean and largest over iterations, bit-equality as mean and smallest."""
    text = table([row(1, 0.1, 0.5, 0.9), row(2, 0.2, 1.5, 0.7)])
    assert "finished after 2 iterations, 0 min 04 s of training" in text
    assert "mismatch max |Δlogp|   1 (mean of iterations), 1.5 (largest)" in text
    assert "bit-equal tokens       80 % (mean of iterations), 70 % (smallest)" in text
    assert "500 trained tokens/s of the whole loop" in text
    assert "p (fingerprint ffffffffffffffff)" in text
    assert "r1" in text


def test_held_out_reward_is_from_before_training_to_the_last_evaluation():
    """The row names both ends; iterations without an evaluation do not count; a single one is called that."""
    key, start = (
        "evaluation/env_runners/episode_return_mean",
        "evaluation_at_start/env_runners/episode_return_mean",
    )
    history = [row(1, 0.1), row(2, 0.1) | {key: 0.5}, row(3, 0.1), row(4, 0.1) | {key: 0.75}]
    assert "held-out reward        0.500 → 0.750 (iteration 2 → iteration 4)" in table(history)
    assert "held-out reward        0.500 (iteration 2, the only evaluation)" in table(history[:3])
    history[0] |= {start: 0.25}
    assert "held-out reward        0.250 → 0.750 (before training → iteration 4)" in table(history)
    assert "held-out reward        0.250 (before training, the only evaluation)" in table(history[:1])


@pytest.mark.parametrize(("iterations", "said"), [(0, False), (1, True), (9, True), (10, False), (60, False)])
def test_a_few_iterations_are_no_verdict(iterations, said):
    """A run of fewer than ten iterations says that they are too few to tell whether it learns; a longer one not."""
    assert (
        "too few to tell whether it learns" in table([row(i + 1, 0.5) for i in range(iterations)])
    ) == said


def test_what_was_not_measured_is_said():
    """A run that ended before its first iteration has a table that says so, without numbers made up."""
    text = table([])
    assert "finished after no iteration" in text
    assert text.count("not measured") == 7


def test_status_line_leaves_out_what_is_missing():
    """The progress line shows reward, mismatch and speed, and only what the iteration measured."""
    full = status_text(row(1, 0.625, 0.5, 0.25))
    assert full == "reward 0.625 · mismatch k3 0.05 max 0.5 bit-equal 25% · 4.0k tok/s"
    assert status_text({"training_iteration": 1.0}) == ""


def test_samples_lost_to_reward_errors_are_shown():
    """Errors of reward functions stand in the progress line and in the closing table, and only if there were some."""
    lost = row(2, 0.2) | {"env_runners/num_reward_errors_lifetime": 12.0}
    assert status_text(lost).endswith("4.0k tok/s · 12 samples lost to reward errors")
    assert "lost to reward errors  12 samples" in table([row(1, 0.1), lost])
    none = row(2, 0.2) | {"env_runners/num_reward_errors_lifetime": 0.0}
    assert "lost" not in status_text(none) + table([row(1, 0.1), none])


def test_history_takes_the_later_row_of_a_repeated_iteration(tmp_path):
    """After a resume, iterations that were run twice count once, as they were run last."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"training_iteration": 1, "x": 1}\n{"training_iteration": 2, "x": 2}\n{"training_iteration": 2, "x": 3}\n'
    )
    assert [r["x"] for r in read_history(tmp_path)] == [1, 3]
    assert read_history(tmp_path / "nowhere") == []


def test_history_survives_a_line_without_its_end(tmp_path):
    """A run that was killed while it wrote a row can be read, and the next row starts on a line of its own."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"training_iteration": 1}\n{"training_iter')
    assert [r["training_iteration"] for r in read_history(tmp_path)] == [1]
    callback = HistoryCallback(tmp_path)
    for iteration in (2, 3):
        callback.on_trial_result(iteration, [], None, {"training_iteration": iteration})
    assert [r["training_iteration"] for r in read_history(tmp_path)] == [1, 2, 3]


def test_stopper_names_its_reason():
    """A run ends at its iterations, at a metric's bound, or after an interrupt, and says which."""
    result = {"training_iteration": 3, "env_runners": {"episode_return_mean": 0.8}}
    interrupt = Interrupt()

    def stopper(iterations, bounds, minutes=None):
        return RunStopper(iterations, bounds, minutes, interrupt)

    never = stopper(10, {"env_runners/episode_return_mean": 0.9})
    assert not never("t", result)
    bound = stopper(10, {"env_runners/episode_return_mean": 0.8, "absent": 0.0})
    assert bound("t", result)
    assert bound.reason == "stopped: env_runners/episode_return_mean >= 0.8"
    last = stopper(3, {})
    assert last("t", result)
    assert last.reason == "finished"
    late = stopper(10, {}, minutes=0.0)
    assert late("t", result)
    assert "minutes are over" in late.reason
    interrupt.requested = True
    assert never("t", result)
    assert never.reason == "interrupted"


@pytest.mark.parametrize("size", [(0, 0), (40, 150)])
def test_a_terminal_shows_a_bar_with_reward_and_mismatch(size, monkeypatch):
    """On a terminal, with or without a known size, a bar shows iteration, reward, mismatch and speed."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = ProgressCallback(4)
        for iteration in (1, 2):
            result = {"training_iteration": iteration, "env_runners": {"episode_return_mean": iteration / 4}}
            progress.on_trial_result(iteration, [], None, result)
        progress.close()
        terminal.flush()
        drawn = ""
        while "reward 0.500" not in drawn and select.select([reader], [], [], 30.0)[0]:  # comes in pieces
            drawn += os.read(reader, 65536).decode(errors="replace")
    os.close(reader)
    assert "25%" in drawn
    assert "2/4" in drawn
    assert "reward 0.500" in drawn


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (0.0, "0"),
        (0.4, "0"),
        (87.2, "87"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (1000.0, "1.0k"),
        (12345.0, "12.3k"),
    ],
)
def test_slow_speeds_are_numbers(speed, text):
    """Tokens per second are shown in thousands from 1000 on, and as they are below."""
    assert status_text({"training_iteration": 1.0, "env_runners/tokens_per_s": speed}) == f"{text} tok/s"


def test_the_status_line_shows_an_evaluation_where_there_was_one():
    """Held-out rewards stand beside the training reward, the one before training named so."""
    start = {"evaluation_at_start/env_runners/episode_return_mean": 0.25}
    end = {"evaluation/env_runners/episode_return_mean": 0.75}
    assert "reward 0.100 · held-out 0.250 before training · " in status_text(row(1, 0.1) | start)
    assert "reward 0.100 · held-out 0.750 · " in status_text(row(9, 0.1) | end)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (3570, "1 h 00 min"), (3900.0, "1 h 05 min")],
)
def test_spans_of_time(seconds, text):
    """Seconds up to a minute and a half, minutes up to an hour, then hours with minutes."""
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("first", "done", "left"),
    [(1, 3, ", about 40 s left"), (1, 1, ""), (None, 3, ""), (1, 5, ""), (3, 4, ", about 40 s left")],
)
def test_time_left_is_at_the_rate_since_the_first_result(first, done, left, monkeypatch):
    """40 s after the first result: at its rate, and nothing where there is no rate or nothing left."""
    monkeypatch.setattr("time.monotonic", lambda: 140.0)
    assert time_left(100.0, first, done, 5) == left
