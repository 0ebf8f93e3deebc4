"""A policy is the same after every way out and back in."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_policies import PrecisionPolicy, available, from_yaml, load_policy, schema
from tests.policies.strategies import policies, section
from tests.random_examples import examples

CASES = examples(60)


@CASES
@given(policies())
def test_yaml_round_trip_is_exact(policy: PrecisionPolicy) -> None:
    """Object -> YAML -> object gives an equal object, fingerprint and the same YAML text."""
    for comments in (True, False):
        text = policy.to_yaml(comments)
        again = from_yaml(text)
        assert again == policy
        assert again.fingerprint == policy.fingerprint
        assert again.to_yaml(comments) == text


@CASES
@given(policies())
def test_json_and_pickle_round_trips_are_exact(policy: PrecisionPolicy) -> None:
    """to_dict survives JSON, and pickling gives an equal policy."""
    assert PrecisionPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("name", available())
def test_shipped_policies_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    """A shipped policy written to a file and loaded from there is equal, name included."""
    policy = load_policy(name)
    path = tmp_path / "written.yaml"
    path.write_text(policy.to_yaml(), encoding="utf-8")
    assert load_policy(path) == policy == load_policy(str(path)) == load_policy(policy)


@CASES
@given(
    st.sampled_from(sorted(available())),
    section(schema.ClipCalibration),
    st.sampled_from(("pad", "exempt", "refuse")),
)
def test_extends_changes_what_is_said_and_nothing_else(base: str, calibration: dict, ragged: str) -> None:
    """A child differs from its parent exactly in the keys that it gives."""
    parent = load_policy(base)
    child = load_policy({"extends": base, "name": "child", "ragged": ragged, "clip_calibration": calibration})
    wanted = parent.to_dict() | {"ragged": ragged, "clip_calibration": calibration}
    got = child.to_dict()
    for key in ("name", "description"):
        wanted.pop(key), got.pop(key)
    assert got == wanted


@CASES
@given(policies())
def test_an_empty_child_computes_the_same(policy: PrecisionPolicy) -> None:
    """Extending without a change keeps the fingerprint, over several generations and whatever the names."""
    generation = policy.to_dict()
    again = PrecisionPolicy.from_dict({**generation, "name": "other", "description": "something else"})
    assert again.fingerprint == policy.fingerprint
    assert policy.diff(again) == []


def test_inheritance_merges_along_a_chain_of_files(tmp_path: Path) -> None:
    """Grandparent, parent and child in different folders: the nearest file that names a key wins."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.yaml").write_text(
        "schema_version: 1\nextends: unified-fp8\nguard: {tolerance: 0.5, patience: 7}\n"
    )
    (tmp_path / "deep/b.yaml").write_text("schema_version: 1\nextends: ../a.yaml\nguard: {patience: 9}\n")
    (tmp_path / "c.yaml").write_text("schema_version: 1\nextends: deep/b.yaml\nguard: {metric: k3}\n")
    policy = load_policy(tmp_path / "c.yaml")
    assert (policy.guard.tolerance, policy.guard.patience, policy.guard.metric) == (0.5, 9, "k3")
    assert policy.name == "c"
    assert policy.linear == load_policy("unified-fp8").linear


def test_lists_are_replaced_not_joined(tmp_path: Path) -> None:
    """A child's list of exempt patterns is its own; the parent's does not shine through."""
    (tmp_path / "a.yaml").write_text(
        "schema_version: 1\nextends: unified-fp8\nexempt: {modules: ['**.o_proj']}\n"
    )
    child = load_policy({"extends": str(tmp_path / "a.yaml"), "exempt": {"modules": ["**.down_proj"]}})
    assert child.exempt.modules == ("**.down_proj",)
    assert load_policy({"extends": str(tmp_path / "a.yaml")}).exempt.modules == ("**.o_proj",)


def test_nothing_in_a_policy_can_be_changed() -> None:
    """Attributes, sections and mappings of a loaded policy refuse assignment."""
    policy = load_policy("unified-fp8")
    with pytest.raises(AttributeError):
        policy.ragged = "pad"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        policy.linear.dgrad = "bf16"  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):
        policy.operator_overrides["rms_norm"] = "because"
    tree = policy.to_dict()
    tree["linear"]["dgrad"] = "bf16"
    assert policy.linear.dgrad == "fp8"
