"""Final reward, divergence and cost, each by its stated rule, on curves with planted events."""

import math
from pathlib import Path

import numpy as np
import pytest

from rllib_llm.compare import Curves, Run, read_curves
from rllib_llm.compare import verdicts as v
from tests.compare.raw import REWARD, noise, rising, write

ROOT = Path(__file__).resolve().parents[2]


def run_of(rewards, status="finished", **more):
    rows = {i: {REWARD: r} | {k: s[i - 1] for k, s in more.items()} for i, r in enumerate(rewards, 1)}
    return Run("a", 0, rows, status)


def curve(iterations=60, fall_at=None, back_at=None, scale=0.01):
    out = [rising(i) + noise(i, 1, scale) for i in range(1, iterations + 1)]
    for i in range(iterations):
        if fall_at is not None and fall_at <= i + 1 and (back_at is None or i + 1 < back_at):
            out[i] -= 0.25
    return out


def test_a_rising_run_is_sound():
    """Learning with noise is no divergence."""
    assert v.health(run_of(curve()), REWARD, 5).kind == "sound"


def test_collapse_is_found_where_it_begins():
    """A reward that loses most of its gain for good collapsed, within the window after the fall."""
    found = v.health(run_of(curve(fall_at=40)), REWARD, 5)
    assert found.kind == "collapsed"
    assert found.diverged
    assert 40 <= found.iteration <= 44


def test_a_run_that_comes_back_dipped():
    """The same fall with a recovery is reported, and is no divergence."""
    found = v.health(run_of(curve(fall_at=30, back_at=40)), REWARD, 5)
    assert (found.kind, found.diverged) == ("dipped", False)


def test_a_run_that_never_gained_can_collapse():
    """A fall below the start counts too, once it is more than noise."""
    flat = [0.5 + noise(i, 2) for i in range(1, 31)] + [0.3 + noise(i, 2) for i in range(1, 21)]
    assert v.health(run_of(flat), REWARD, 5).kind == "collapsed"


def test_pure_noise_is_sound():
    """2 000 flat runs of white noise: fewer than 2 % are called collapsed or dipped."""
    rng = np.random.default_rng(0)
    called = sum(v.health(run_of(rng.normal(0.5, 0.05, 40)), REWARD, 5).kind != "sound" for _ in range(2000))
    assert called < 40


@pytest.mark.parametrize("name", [REWARD, v.LOSS, v.GRAD_NORM])
def test_values_that_are_not_finite_are_a_divergence(name):
    """NaN or inf in reward, loss or gradient norm, at the iteration where it came first."""
    rewards, other = curve(20), [1.0] * 20
    (rewards if name == REWARD else other)[12] = math.inf
    found = v.health(run_of(rewards, **({} if name == REWARD else {name: other})), REWARD, 5)
    assert (found.kind, found.iteration) == ("non-finite", 13)


@pytest.mark.parametrize("status", ["failed", "halted"])
def test_runs_that_were_ended_diverged(status):
    """An error or the guard's halt is a divergence by itself."""
    assert v.health(run_of(curve(), status), REWARD, 5).kind == status


def test_finals_are_compared_at_one_iteration(tmp_path):
    """Runs under way are cut to a common iteration, one that has just begun is left out, a failed one keeps its own."""
    ends = {0: 40, 1: 30, 2: 3, 3: 12}
    writer = write(tmp_path, {"a": lambda i, s: float(i) if i <= ends[s] else None}, seeds=4)
    writer.status("a", 3, "failed", "boom")
    finals = v.final_rewards(read_curves(tmp_path), REWARD, 5)
    assert finals.horizon == 30
    assert finals.values == {"a": {0: 28.0, 1: 28.0, 3: 10.0}}
    assert [run.seed for run in finals.left_out] == [2]


def test_cost_is_counted_to_the_first_crossing(tmp_path):
    """Tokens and seconds up to the iteration whose trailing mean reaches the target; None where none does."""
    write(tmp_path, {"a": lambda i, s: i / 40}, seeds=1)
    [run] = read_curves(tmp_path).runs
    cost = v.cost_to_reach(run, REWARD, 0.5, 5)
    assert (cost.iteration, cost.tokens, cost.seconds) == (22, 2200.0, 22 * 3.5)
    assert v.cost_to_reach(run, REWARD, 2.0, 5).iteration is None


def test_the_default_target_is_nine_tenths_of_the_baselines_gain(tmp_path):
    """From the mean first reward of all runs to the baseline's final one; none where the baseline lost."""
    write(tmp_path, {"base": lambda i, s: rising(i), "down": lambda i, s: 0.515 - i / 1000}, seeds=2)
    curves = read_curves(tmp_path)
    finals = v.final_rewards(curves, REWARD, 5)
    assert v.default_target(curves, finals, "base", REWARD) == pytest.approx(
        0.5145 + 0.9 * (0.8 - 0.5145), abs=1e-3
    )
    assert v.default_target(curves, finals, "down", REWARD) is None


def test_seconds_are_summed_over_phases_where_the_whole_was_not_timed():
    """`time_this_iter_s` counts where it is there."""
    run = Run(
        "a",
        0,
        {1: {"timers/sample": 2.0, "timers/learn": 1.0}, 2: {"timers/sample": 2.0, v.SECONDS: 9.0}, 3: {}},
    )
    assert v.seconds_of(run) == {1: 3.0, 2: 9.0}


def test_an_arm_without_the_metric_has_no_final():
    """Nothing is made up for runs that did not measure what is compared."""
    curves = Curves((run_of([0.5] * 10), Run("b", 0, {1: {"loss": 1.0}}, "finished")))
    assert set(v.final_rewards(curves, REWARD, 5).values) == {"a"}


def test_the_rules_are_those_of_the_docs():
    """docs/experiments.md states the rules in the report's words."""
    text = " ".join((ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").split())
    for rule in v.RULES.values():
        assert rule.format(last=5) in text
