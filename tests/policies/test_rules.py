"""Impossible combinations and malformed values: all of them, in one message, with a remedy."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from precision_policies import PolicyError, PrecisionOverrideWarning, load_policy
from precision_policies.errors import Violation


def violations(changes: dict[str, Any], base: str = "unified-fp8") -> dict[str, Violation]:
    """Violations by key of a child of `base`."""
    with pytest.raises(PolicyError) as caught:
        load_policy({"extends": base, **changes})
    return {v.key: v for v in caught.value.violations}


def test_malformed_values_and_impossible_combinations_come_in_one_message() -> None:
    """Unknown keys, wrong types, bad choices, missing sections' rules and cross-key rules are all listed together."""
    with pytest.raises(PolicyError) as caught:
        load_policy(
            {
                "extends": "mixed-bf16-fp8",
                "gaurd": {"action": "halt"},
                "linear": {"saved": "fp8", "dgrad": "fp4"},
                "correction": {"upper": "2"},
                "quantisation": {"scale_format": "ue8m0", "scale_floor": 1e-12},
                "loss_scaling": {"initial": 0.5, "growth_interval": True},
                "guard": {"action": "halt", "tolerance": 0},
                "gradient_dtype": "float32",
            }
        )
    text = str(caught.value)
    for part in (
        "gaurd",
        "did you mean 'guard'?",
        "linear.dgrad = 'fp4'",
        "correction.upper = '2': is not a number",
        "quantisation.scale_floor = 1e-12: is not a power of two",
        "loss_scaling.initial = 0.5: out of range",
        "loss_scaling.growth_interval = True: is not a whole number",
        "gradient_dtype = 'float32'",
    ):
        assert part in text
    assert f"{len(caught.value.violations)} violations" in text


def test_rules_still_run_beside_a_malformed_section() -> None:
    """A broken guard does not hide that fp16 gradients lack a loss scale."""
    found = violations({"guard": {"patience": 0}, "linear": {"wgrad": "fp16"}})
    assert set(found) == {"guard.patience", "loss_scaling"}


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        (
            {"extends": "fp16", "master_dtype": "split_float32"},
            "master_dtype",
            "compute_dtype is float16",
        ),
        ({"linear": {"train_forward": "bf16", "rollout_forward": "bf16"}}, "linear.saved", "makes none"),
        (
            {"linear": {"train_forward": "fp16", "rollout_forward": "fp16"}},
            "linear.train_forward",
            "compute_dtype",
        ),
        ({"linear": {"saved": "fp32"}}, "linear.saved", "compute_dtype"),
        ({"gradient_dtype": "float32"}, "gradient_dtype", "activations"),
        ({"lm_head": {"train_forward": "fp16"}}, "lm_head.train_forward", "compute_dtype"),
        ({"norm": {"residual": "fp32"}}, "norm.residual", "compute_dtype"),
        ({"kv_cache": {"format": "fp32"}}, "kv_cache.format", "uncached"),
        (
            {"quantisation": {"scale_format": "ue8m0", "scale_floor": 1e-20}},
            "quantisation.scale_floor",
            "power",
        ),
        ({"quantisation": {"scale_floor": 1e-4}}, "quantisation.scale_floor", "out of range"),
        ({"linear": {"wgrad": "fp16"}}, "loss_scaling", "6e-8"),
        ({"linear": {"dgrad": "fp16"}}, "linear.wgrad", "overflow"),
        ({"compute_dtype": "float16"}, "linear.wgrad", "overflow"),
        ({"correction": {"kind": "tis_token"}}, "correction.upper", "needs this bound"),
        ({"correction": {"kind": "icepop", "upper": 2.0}}, "correction.lower", "needs this bound"),
        (
            {"correction": {"kind": "tis_token", "upper": 2.0, "lower": 0.5}},
            "correction.lower",
            "no such bound",
        ),
        ({"correction": {"kind": "icepop", "upper": 1.0, "lower": 1.0}}, "correction.lower", "not below"),
        ({"correction": {"upper": 2.0}}, "correction.upper", "no such bound"),
        ({"correction": {"veto": 0.1}}, "correction.veto", "no correction"),
        ({"operators": "scheme"}, "correction.kind", "off-policy"),
        ({"linear": {"rollout_forward": "bf16"}}, "correction.kind", "fp8 in training, bf16 in rollout"),
        ({"guard": {"action": "correct"}}, "guard.action", "no correction"),
        (
            {"correction": {"kind": "tis_token", "upper": 2, "when": "guard"}},
            "correction.when",
            "action is halt",
        ),
        ({"guard": {"metric": "bit_equal_share", "tolerance": 1.5}}, "guard.tolerance", "at most 1"),
        ({"operator_overrides": {"rms_norm": " "}}, "operator_overrides.rms_norm", "reason"),
        ({"name": "a b"}, "name", "usable"),
        ({"description": "${oc.env:HOME}"}, "description", "same in every process"),
        ({"exempt": {"modules": "lm_head"}}, "exempt.modules", "list"),
        ({"exempt": {"first_layers": -1}}, "exempt.first_layers", "out of range"),
        ({"operator_overrides": {"a": 3}}, "operator_overrides", "mapping"),
        ({"linear": None}, "linear", "mapping"),
        ({"compute_dtype": "bf16"}, "compute_dtype", "did you mean 'bfloat16'"),
        ({"guard": {"tolerance": float("nan")}}, "guard.tolerance", "finite"),
        ({"guard": {"tolerance": 10**400}}, "guard.tolerance", "finite"),
    ],
)
def test_each_rule_refuses_its_combination(changes: dict[str, Any], key: str, why: str) -> None:
    """The violation names the key, says why, and its remedy is not empty."""
    found = violations(changes)
    assert key in found, f"found only {list(found)}"
    assert why in str(found[key])
    assert found[key].remedy


def test_a_halting_guard_at_zero_needs_an_on_policy_precision() -> None:
    """mixed with tolerance 0 and action halt would stop at once, and is refused for that reason."""
    found = violations({"guard": {"tolerance": 0.0, "action": "halt"}}, "mixed-bf16-fp8")
    assert "at once" in found["guard.tolerance"].problem


def test_running_mixed_without_a_correction_must_be_said() -> None:
    """kind: none alone is refused; with accept_uncorrected: true it loads and is still off-policy."""
    off = {"kind": "none", "upper": None}
    assert "accept_uncorrected" in violations({"correction": off}, "mixed-bf16-fp8")["correction.kind"].remedy
    policy = load_policy({"extends": "mixed-bf16-fp8", "correction": {**off, "accept_uncorrected": True}})
    assert not policy.exactly_on_policy
    assert policy.correction.kind == "none"


def test_a_remedy_named_in_a_message_works() -> None:
    """What the messages tell to write makes the policy load: loss scale, power-of-two floor, correction."""
    load_policy(
        {
            "extends": "unified-fp8",
            "linear": {"dgrad": "fp16", "wgrad": "fp16"},
            "loss_scaling": {"initial": 65536.0, "growth_interval": 1000},
        }
    )
    floor = violations({"quantisation": {"scale_format": "ue8m0", "scale_floor": 1e-12}})[
        "quantisation.scale_floor"
    ]
    value = float(floor.remedy.removeprefix("use "))
    assert (
        load_policy(
            {"extends": "unified-fp8", "quantisation": {"scale_format": "ue8m0", "scale_floor": value}}
        ).scale_floor
        == value
    )
    load_policy(
        {
            "extends": "unified-fp8",
            "operators": "scheme",
            "guard": {"action": "warn"},
            "correction": {"kind": "tis_token", "upper": 2.0},
        }
    )


def test_replace_cannot_make_a_policy_that_cannot_be() -> None:
    """dataclasses.replace goes through the same checks as loading."""
    policy = load_policy("unified-fp8")
    assert dataclasses.replace(policy, ragged="refuse").ragged == "refuse"
    with pytest.raises(PolicyError, match="ragged"):
        dataclasses.replace(policy, ragged="crop")
    with pytest.raises(PolicyError, match="makes none"):
        dataclasses.replace(policy, linear=dataclasses.replace(policy.linear, train_forward="bf16"))


def test_an_override_is_loud_recorded_and_ends_on_policyness() -> None:
    """A policy with an operator override warns when made, keeps the reason, and needs a correction or a word."""
    changes = {"extends": "unified-fp8", "operator_overrides": {"rms_norm": "bisecting #12"}}
    with pytest.raises(PolicyError, match="bisecting #12"):
        load_policy(changes)
    changes |= {"correction": {"accept_uncorrected": True}, "guard": {"action": "warn"}}
    with pytest.warns(PrecisionOverrideWarning, match=r"rms_norm.*bisecting #12"):
        policy = load_policy(changes)
    assert not policy.exactly_on_policy
    assert policy.to_dict()["operator_overrides"] == {"rms_norm": "bisecting #12"}
    assert policy.fingerprint != load_policy("unified-fp8").fingerprint


def test_keys_in_a_section_are_suggested_from_that_section() -> None:
    """An unknown key inside a section gets the nearest key of that section and the list of allowed keys."""
    found = violations({"linear": {"dgard": "fp8"}})
    assert "did you mean 'dgrad'?" in found["linear.dgard"].problem
    assert "train_forward" in found["linear.dgard"].remedy


def test_policy_errors_survive_a_process_boundary() -> None:
    """A PolicyError with missing and malformed keys reads the same after pickling, as Ray does it."""
    with pytest.raises(PolicyError) as caught:
        load_policy({"name": "alone", "ragged": "crop"})
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [v.key for v in again.violations] == [v.key for v in caught.value.violations]


def test_a_policy_without_a_parent_must_be_complete() -> None:
    """No number comes from code: without `extends` every missing key is listed."""
    with pytest.raises(PolicyError) as caught:
        load_policy({"name": "alone"})
    missing = {v.key for v in caught.value.violations}
    assert {"linear", "guard", "compute_dtype", "ragged"} <= missing
    assert "extends: bf16" in str(caught.value)
