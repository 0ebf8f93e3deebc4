"""The contract: every difference that can change bits stops the run, every other one does not."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from typing import Any

import pytest

from precision_policies import (
    Attestation,
    PolicyError,
    PrecisionMismatchError,
    PrecisionOverrideWarning,
    PrecisionPolicy,
    compare_attestations,
    load_policy,
)
from precision_policies.environment import UNSET
from precision_policies.hashing import differing

UNIFIED = load_policy("unified-fp8")
MIXED = load_policy("mixed-bf16-fp8")
SCHEME = load_policy(
    {
        "extends": "unified-fp8",
        "operators": "scheme",
        "guard": {"action": "warn"},
        "correction": {"accept_uncorrected": True},
    }
)


def attest(side: str, policy: PrecisionPolicy = UNIFIED, **changes: Any) -> Attestation:
    """What a healthy CPU process says."""
    values: dict[str, Any] = {
        "policy_fingerprint": policy.fingerprint,
        "plan_hash": "p" * 64,
        "operators": {"linear": "reference@1#aa", "rms_norm": "reference@1#bb"},
        "versions": {"torch": "2.13.0"},
        "environment": policy.environment("torch", "cpu"),
        "tensor_parallel": 1,
        "scale_format": policy.scale_format,
        "informational": {"host": side, "pid": 1},
    }
    return Attestation(side=side, **(values | changes))


def violations(policy: PrecisionPolicy, *sides: Attestation) -> dict[str, Any]:
    """Violations by key."""
    with pytest.raises(PrecisionMismatchError) as caught:
        compare_attestations(policy, *sides)
    return {v.key: v for v in caught.value.violations}


@pytest.mark.parametrize("policy", [UNIFIED, MIXED, SCHEME], ids=lambda p: p.name)
def test_equal_sides_pass_whatever_their_host(policy: PrecisionPolicy) -> None:
    """Host name and process id differ and do not count; any number of runners may be compared at once."""
    sides = [attest(f"rollout/{i}", policy, informational={"host": f"n{i}"}) for i in range(4)]
    compare_attestations(policy, attest("train", policy), *sides)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policy_fingerprint": MIXED.fingerprint}, "rollout.policy_fingerprint"),
        ({"plan_hash": "q" * 64}, "train.plan_hash"),
        ({"scale_format": "ue8m0"}, "rollout.scale_format"),
        ({"operators": {"linear": "triton@1#cc", "rms_norm": "reference@1#bb"}}, "train.operators.linear"),
        ({"operators": {"linear": "reference@1#aa"}}, "train.operators.rms_norm"),
        ({"versions": {"torch": "2.12.0"}}, "train.versions.torch"),
        ({"tensor_parallel": 2}, "train.tensor_parallel"),
        (
            {"environment": {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}},
            "rollout.environment.ONEDNN_DEFAULT_FPMATH_MODE",
        ),
        ({"environment": {"VLLM_USE_DEEP_GEMM_E8M0": "1"}}, "rollout.environment.VLLM_USE_DEEP_GEMM_E8M0"),
        ({"environment": {"VLLM_USE_DEEP_GEMM_E8M0": UNSET}}, "rollout.environment.VLLM_USE_DEEP_GEMM_E8M0"),
    ],
)
def test_each_difference_is_one_violation_with_both_values(changes: dict[str, Any], key: str) -> None:
    """Exactly the changed item is reported; the message has the value of either side and a remedy."""
    found = violations(UNIFIED, attest("train"), attest("rollout", **changes))
    assert list(found) == [key]
    text = str(found[key])
    for value in changes.values():
        shown = (
            value
            if isinstance(value, str)
            else str(next(iter(value.values())) if isinstance(value, dict) else value)
        )
        assert shown in text or "<absent>" in text
    assert found[key].remedy


def test_all_violations_come_at_once_and_name_their_sides() -> None:
    """Three runners wrong in different ways give one error with all of it."""
    found = violations(
        UNIFIED,
        attest("train"),
        attest("rollout/1", plan_hash="x", tensor_parallel=4),
        attest("rollout/2", versions={"torch": "1", "triton": "3"}),
        attest("rollout/3", scale_format="ue8m0", policy_fingerprint="f"),
    )
    assert len(found) == 5
    text = "\n".join(map(str, found.values()))
    for part in ("rollout/1.plan_hash = 'x'", "rollout/2.versions.torch = '1'", "rollout/3.scale_format"):
        assert part in text


def test_what_only_one_side_has_is_compared_where_it_counts() -> None:
    """A library of one side only does not count; weights that one side does not hold are for the receipt."""
    compare_attestations(
        UNIFIED,
        attest("train", versions={"torch": "2.13.0", "ray": "2.60"}),
        attest("rollout", versions={"torch": "2.13.0", "vllm": "0.32"}, weights={"a": "1"}),
    )


def test_weights_that_both_hold_must_be_equal() -> None:
    """Hashes of the same tensor are compared under every policy."""
    sides = (attest("train", SCHEME, weights={"w": "1"}), attest("rollout", SCHEME, weights={"w": "2"}))
    assert list(violations(SCHEME, *sides)) == ["train.weights.w"]


def test_scheme_compares_formats_but_not_implementations() -> None:
    """Other operators, versions and layouts pass under operators: scheme; scale format and plan still count."""
    other = {"operators": {"linear": "vllm@0.32#zz"}, "versions": {"torch": "2.12"}, "tensor_parallel": 2}
    compare_attestations(SCHEME, attest("train", SCHEME), attest("rollout", SCHEME, **other))
    found = violations(
        SCHEME, attest("train", SCHEME), attest("rollout", SCHEME, scale_format="ue8m0", plan_hash="")
    )
    assert set(found) == {"rollout.scale_format", "train.plan_hash"}


def test_a_one_sided_operator_counts_only_if_the_sides_should_be_equal() -> None:
    """mixed needs fp8 operators on one side only; under unified a missing operator is a violation."""
    more = {"linear": "reference@1#aa", "rms_norm": "reference@1#bb", "quantise_activation": "reference@1#cc"}
    compare_attestations(MIXED, attest("train", MIXED), attest("rollout", MIXED, operators=more))
    assert "train.operators.quantise_activation" in violations(
        UNIFIED, attest("train"), attest("rollout", operators=more)
    )
    differs = {"linear": "other@1#aa", "rms_norm": "reference@1#bb"}
    assert "train.operators.linear" in violations(
        MIXED, attest("train", MIXED), attest("rollout", MIXED, operators=differs)
    )


def test_silence_about_operators_is_a_violation() -> None:
    """Two sides that attest nothing are not thereby equal."""
    found = violations(UNIFIED, attest("train", operators={}), attest("rollout", operators={}))
    assert set(found) == {"train.operators", "rollout.operators"}


def test_a_side_that_names_its_engine_must_attest_the_whole_table() -> None:
    """With engine and device given, a variable that was not read back is a violation."""
    whole = UNIFIED.environment("vllm", "cuda")
    train = attest("train")
    compare_attestations(UNIFIED, train, attest("rollout", engine="vllm", device="cuda", environment=whole))
    del whole["VLLM_USE_DEEP_GEMM_E8M0"]
    found = violations(UNIFIED, train, attest("rollout", engine="vllm", device="cuda", environment=whole))
    assert "<absent>" in str(found["rollout.environment.VLLM_USE_DEEP_GEMM_E8M0"])
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in found["rollout.environment.VLLM_USE_DEEP_GEMM_E8M0"].remedy


def test_unset_counts_as_the_value_that_it_surely_means() -> None:
    """ONEDNN_DEFAULT_FPMATH_MODE unset is STRICT; a variable whose default differs by version must be set."""
    compare_attestations(
        UNIFIED, attest("train", environment={"ONEDNN_DEFAULT_FPMATH_MODE": UNSET}), attest("rollout")
    )


def test_other_numeric_variables_must_agree_between_the_sides() -> None:
    """A variable outside the table that both attest is compared with the other side."""
    sides = (
        attest("train", environment={"MKL_CBWR": "AVX2"}),
        attest("rollout", environment={"MKL_CBWR": "COMPATIBLE"}),
    )
    assert list(violations(UNIFIED, *sides)) == ["train.environment.MKL_CBWR"]


def test_an_overridden_operator_may_differ_loudly() -> None:
    """The override lets only that operator differ, and says so when it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionOverrideWarning)
        policy = load_policy(
            {
                "extends": "unified-fp8",
                "operator_overrides": {"rms_norm": "bisecting"},
                "correction": {"accept_uncorrected": True},
                "guard": {"action": "warn"},
            }
        )
    other = attest("rollout", policy, operators={"linear": "reference@1#aa", "rms_norm": "mine@0#00"})
    with pytest.warns(PrecisionOverrideWarning, match="rms_norm.*reference@1#bb.*mine@0#00"):
        compare_attestations(policy, attest("train", policy), other)
    other = attest("rollout", policy, operators={"linear": "mine@1#aa", "rms_norm": "reference@1#bb"})
    assert list(violations(policy, attest("train", policy), other)) == ["train.operators.linear"]


def test_attestations_travel_and_are_frozen() -> None:
    """JSON and pickle round trips are exact; contents cannot be changed; unknown and missing keys are refused."""
    one = attest("train", weights={"w": "1"})
    assert Attestation.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(TypeError):
        one.operators["linear"] = "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.side = "x"  # type: ignore[misc]
    broken = {**one.to_dict(), "extra": 1, "weights": 3}
    del broken["plan_hash"]
    with pytest.raises(PolicyError) as caught:
        Attestation.from_dict(broken)
    assert {v.key for v in caught.value.violations} == {"extra", "plan_hash", "weights"}


def test_errors_keep_their_violations_across_processes() -> None:
    """A PrecisionMismatchError raised in a Ray actor is pickled; type, message and violations survive."""
    with pytest.raises(PrecisionMismatchError) as caught:
        compare_attestations(UNIFIED, attest("train"), attest("rollout", plan_hash="x"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is PrecisionMismatchError
    assert str(again) == str(caught.value)
    assert again.violations == caught.value.violations


def test_differing_hashes_are_missing_extra_and_changed_ones() -> None:
    """Every kind of difference between what was sent and what is held is named, sorted; equal ones are not."""
    sent = {"c": "3", "b": "2", "a": "1"}
    assert differing(sent, dict(sent)) == differing({}, {}) == {}
    assert list(differing(sent, {"d": "4", "b": "9", "a": "1"}).items()) == [
        ("b", ("2", "9")),
        ("c", ("3", None)),
        ("d", (None, "4")),
    ]
    assert differing({"a": ""}, {}) == {"a": ("", None)}


@pytest.mark.parametrize("variable", ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
def test_switches_of_torch_stand_in_for_variables_that_are_not_set(variable: str) -> None:
    """A process that states that TF32 is off in torch needs no variable for it; one that is set to 1 stays refused."""
    whole = UNIFIED.environment("torch", "cuda")
    without = {k: v for k, v in whole.items() if k != variable}
    off = {
        "torch.backends.cuda.matmul.fp32_precision": "ieee",
        "torch.backends.cudnn.fp32_precision": "ieee",
    }

    def stated(environment: dict[str, str]) -> Attestation:
        return attest("train", engine="torch", device="cuda", environment=environment)

    fine = attest("rollout", engine="torch", device="cuda", environment=whole)
    compare_attestations(UNIFIED, stated(without | off), fine)
    for switch in off:
        for value in ({switch: "tf32"}, {}):
            broken = {k: v for k, v in off.items() if k != switch} | value
            assert f"train.environment.{variable}" in violations(UNIFIED, stated(without | broken), fine)
    assert f"train.environment.{variable}" in violations(UNIFIED, stated(whole | off | {variable: "1"}), fine)
