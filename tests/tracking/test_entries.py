"""Names and values fit MLflow's limits, checked with MLflow's own validators."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils import validation

from rllib_llm.tracking import entries

names = st.text(min_size=0, max_size=400)


@given(names)
def test_clean_key_is_accepted_by_mlflow(key):
    """Whatever a key holds, its cleaned form passes MLflow's validator for metric names and its length limit."""
    cleaned = entries.clean_key(key)
    validation._validate_metric_name(cleaned)
    assert 1 <= len(cleaned) <= validation.MAX_ENTITY_KEY_LENGTH


@given(st.dictionaries(names, st.integers(), max_size=12))
def test_clean_keys_loses_no_entry(flat):
    """Two keys that clean to one name both stay, and every name is valid."""
    cleaned = entries.clean_keys(flat)
    assert sorted(cleaned.values()) == sorted(flat.values())
    for name in cleaned:
        validation._validate_metric_name(name)
        assert len(name) <= validation.MAX_ENTITY_KEY_LENGTH


def test_ordinary_keys_are_unchanged():
    """A key that MLflow accepts keeps its spelling."""
    for key in ("env_runners/episode_return_mean", "mismatch/k3", "timers/env step", "a.b-c_d/e"):
        assert entries.clean_key(key) == key


def test_metrics_hold_finite_numbers_only():
    """NaN (what RLlib reports for an unlogged metric) and infinity make no row; nor do texts, lists and the echo."""
    result = {
        "training_iteration": 3,
        "env_runners": {"episode_return_mean": 0.5, "unlogged": float("nan")},
        "learners": {"default_policy": {"loss": float("inf"), "grad%norm": 1}},
        "config": {"lr": 1.0},
        "pid": 17,
        "samples": [{"prompt": "1+1"}],
        "precision": {"policy": "bf16"},
        "missing": None,
    }
    assert entries.metrics_of(result) == {
        "training_iteration": 3.0,
        "env_runners/episode_return_mean": 0.5,
        "learners/default_policy/grad_norm": 1.0,
    }


def test_params_are_cut_to_the_limit_and_stay_readable():
    """A value longer than MLflow takes ends in an ellipsis; classes are named, lists are JSON."""
    params = entries.params_of(
        {"long": "x" * 9000, "cls": dict, "list": [1, 2], "nested": {"on": True}, "empty": {}}
    )
    assert len(params["long"]) == validation.MAX_PARAM_VAL_LENGTH
    assert params["long"].endswith("…")
    assert params["cls"] == "builtins.dict"
    assert params["list"] == "[1, 2]"
    assert params["nested.on"] == "true"
    assert params["empty"] == "{}"


def test_limits_are_mlflows():
    """The constants here are the ones that the installed MLflow enforces."""
    assert entries.MAX_KEY == validation.MAX_ENTITY_KEY_LENGTH
    assert entries.MAX_PARAM_VALUE <= validation.MAX_PARAM_VAL_LENGTH
    assert entries.MAX_TAG_VALUE <= validation.MAX_TAG_VAL_LENGTH
    assert entries.PARAMS_PER_BATCH == validation.MAX_PARAMS_TAGS_PER_BATCH
    assert entries.METRICS_PER_BATCH == validation.MAX_METRICS_PER_BATCH


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (3, [3]), (4, [3, 1]), (6, [3, 3])])
def test_chunks(count, sizes):
    """Chunks keep order and count; only the last may be short."""
    parts = list(entries.chunks(range(count), 3))
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == list(range(count))
