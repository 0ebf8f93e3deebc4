"""Differences are said as consequences."""

from __future__ import annotations

import pytest

from precision_policies import available, load_policy


def consequences(ours: str, theirs: str) -> dict[str, str]:
    """Consequence by key."""
    return {d.key: d.consequence for d in load_policy(ours).diff(load_policy(theirs))}


def test_rollout_weights_and_on_policyness() -> None:
    """From unified-fp8 to a BF16 rollout: what the weights become, what it costs, and that on-policy is lost."""
    theirs = load_policy(
        {
            "extends": "unified-fp8",
            "linear": {"rollout_forward": "bf16"},
            "guard": {"action": "warn"},
            "correction": {"kind": "tis_token", "upper": 2.0},
        }
    )
    found = {d.key: d.consequence for d in load_policy("unified-fp8").diff(theirs)}
    assert found["linear.rollout_forward"].startswith("rollout weights: e4m3 128×128 → bf16")
    assert "×1.94" in found["linear.rollout_forward"]
    assert found["exactly_on_policy"].startswith(
        "on-policy: yes → no (because of linear: fp8 in training, bf16"
    )
    assert found["guard.action"] == "mismatch beyond tolerance: stops the run → is logged"
    assert found["environment.VLLM_USE_DEEP_GEMM"] == "environment: VLLM_USE_DEEP_GEMM=1 → 0"


def test_the_backward_variants_differ_in_the_backward_only() -> None:
    """fp8 and bf16 backward differ in dgrad, wgrad, and nothing on the rollout side."""
    found = consequences("unified-fp8", "unified-fp8-bf16-backward")
    assert found == {
        "linear.dgrad": "projections, input-gradient GEMM (dgrad): e4m3 1×128 → bf16",
        "linear.wgrad": "projections, weight-gradient GEMM (wgrad): e4m3 128×1 → bf16",
    }


def test_ue8m0_says_what_happens_to_scales_and_environment() -> None:
    """The scale format is the one key; the variable follows from it."""
    found = consequences("unified-fp8", "unified-fp8-ue8m0")
    assert found == {
        "quantisation.scale_format": "scales of every fp8 block: fp32 → ue8m0",
        "environment.VLLM_USE_DEEP_GEMM_E8M0": "environment: VLLM_USE_DEEP_GEMM_E8M0=0 → 1",
    }


@pytest.mark.parametrize("a", sorted(available()))
@pytest.mark.parametrize("b", sorted(available()))
def test_diff_is_empty_exactly_for_equal_numbers_and_mirrors(a: str, b: str) -> None:
    """No difference iff equal fingerprints; the other direction has the same keys with values exchanged."""
    ours, theirs = load_policy(a), load_policy(b)
    forth, back = ours.diff(theirs), theirs.diff(ours)
    assert bool(forth) == (ours.fingerprint != theirs.fingerprint)
    assert {(d.key, repr(d.ours), repr(d.theirs)) for d in forth} == {
        (d.key, repr(d.theirs), repr(d.ours)) for d in back
    }
    assert all("→" in d.consequence and "None" not in d.consequence for d in forth)


def test_loss_scaling_is_one_difference() -> None:
    """Going from no loss scale to one is said once, with its values."""
    assert (
        consequences("bf16", "fp16")["loss_scaling"]
        == "loss scaling: none → initial 65536, growth_interval 1000"
    )
