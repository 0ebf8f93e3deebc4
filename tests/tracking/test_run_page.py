"""What MLflow's page of a run shows: pure functions of metrics and configs."""

import pytest

from rllib_llm.tracking import run_page

BINNED = {
    "mismatch/by_environment/a/b/k3": 0.5,
    "mismatch/by_probability/0.9-1.0/k3": 0.25,
    "mismatch/k3": 0.125,
}


@pytest.mark.parametrize("detail", [False, True])
def test_bins_are_left_out_unless_asked_for(detail):
    """Metrics of a bin are on the page only with `detail`; the metric over all tokens always is."""
    page = run_page.page_metrics(BINNED, detail=detail)
    assert page["at_a_glance/mismatch_k3"] == page["mismatch/k3"] == 0.125
    assert ("mismatch/by_probability/0.9-1.0/k3" in page) == detail


def test_a_bin_whose_name_has_a_slash_is_one_bin():
    """Environments name bins, and may have slashes; iterations without bins make no row."""
    table = run_page.bins_table([(1, BINNED), (2, {"mismatch/k3": 0.0})])
    assert table == {
        "iteration": [1, 1],
        "by": ["mismatch by environment", "mismatch by probability"],
        "bin": ["a/b", "0.9-1.0"],
        "k3": [0.5, 0.25],
    }
    assert run_page.bins_table([]) == run_page.bins_table([(1, {"x": 1.0})]) == {}


def test_the_evaluation_before_training_is_step_zero():
    """It is not among the metrics of the first iteration, and has the names that later evaluations have."""
    key = "env_runners/episode_return_mean"
    values = {f"evaluation_at_start/{key}": 0.0, f"evaluation/{key}": 0.5}
    assert run_page.start_metrics(values) == {f"evaluation/{key}": 0.0, "at_a_glance/held_out_reward": 0.0}
    assert run_page.page_metrics(values) == {f"evaluation/{key}": 0.5, "at_a_glance/held_out_reward": 0.5}
    assert "Held-out reward **0.000 → 0.500** (iteration 0 → 7)." in run_page.outcome([(7, values)])


@pytest.mark.parametrize(
    ("searched", "name"),
    [
        ({}, "t"),
        ({"train/lr": 1e-4}, "lr=0.0001"),
        ({"train": {"lr": 1e-4}, "precision/policy": "bf16"}, "lr=0.0001 policy=bf16"),
        ({"a/lr": 1, "b/lr": 2}, "a.lr=1 b.lr=2"),
        ({"x": "y" * 500}, "x=" + "y" * 117 + "…"),
    ],
)
def test_trials_are_named_by_what_was_searched(searched, name):
    """Short names where they tell the values apart, whole ones where not, within MLflow's width."""
    assert run_page.trial_name(searched, "t") == name


@pytest.mark.parametrize(
    "config",
    [
        {"env": "jsonl", "env_config": {"path": "/data/gsm8k/train.jsonl"}, "evaluation_interval": 5},
        {
            "env": {"name": "jsonl", "config": {"path": "/data/gsm8k/train.jsonl"}},
            "evaluation": {"interval": 5},
        },
    ],
)
def test_the_task_of_a_trial_and_of_an_experiment_is_one_data_set(config):
    """RLlib's config and the experiment's file name the same task: same name, same digest, for both uses."""
    training, evaluation = run_page.inputs_of(config)
    assert (training["name"], training["context"]) == ("jsonl train.jsonl", "training")
    assert (evaluation["name"], evaluation["context"]) == ("jsonl train.jsonl", "evaluation")
    assert (
        training["digest"] == evaluation["digest"] == run_page.inputs_of({**config, "extra": 1})[0]["digest"]
    )


@pytest.mark.parametrize("config", [{}, {"env": None}, {"env": ""}, {"env": {}}, {"env_config": None}])
def test_a_config_that_says_little_is_described_by_little(config):
    """Nothing is made up: no task is no data set, and no sentence."""
    assert run_page.inputs_of(config) == []
    assert run_page.describe(config) == ""
