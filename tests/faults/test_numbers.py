"""Numbers that no training survives are refused before it starts, by the name of their setting."""

import pytest

from rllib_llm.experiment.errors import ExperimentError
from rllib_llm.experiment.file import load_experiment


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.lr=1e38", "train.lr"),
        ("train.lr=[[0, 1e-6], [100, 1e38]]", "train.lr"),
        ("rollout.temperature=1e-45", "rollout.temperature"),
        ("rollout.temperature=9e-6", "rollout.temperature"),
        ("rollout.eval_temperature=1e-45", "rollout.eval_temperature"),
        ("rollout.stop=['']", "rollout.stop"),
        ("rollout.stop=['END', '']", "rollout.stop"),
    ],
)
def test_a_number_that_breaks_training_is_refused(override, key):
    """The error names the setting; the smallest temperature and the largest rate that are allowed are not refused."""
    with pytest.raises(ExperimentError) as caught:
        load_experiment("quickstart", [override]).to_grpo_config()
    assert key in {violation.key for violation in caught.value.violations}


def test_the_bounds_themselves_are_allowed():
    """Greedy evaluation, temperature 0.01 and a rate of 1 start."""
    texts = [
        "train.lr=1.0",
        "rollout.temperature=0.01",
        "rollout.eval_temperature=0.0",
        "rollout.stop=['END']",
    ]
    load_experiment("quickstart", texts).to_grpo_config()
