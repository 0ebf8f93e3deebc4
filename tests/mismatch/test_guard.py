"""The guard: when it acts, what it says, what it remembers."""

from __future__ import annotations

import json
import math

import pytest

from precision_policies import Attestation, schema
from rllib_llm.mismatch.guard import Evidence, Guard, changed_sides, hints


def spec(
    metric: str = "max_abs", tolerance: float = 0.1, action: str = "halt", patience: int = 1
) -> schema.Guard:
    return schema.Guard(metric=metric, tolerance=tolerance, action=action, patience=patience)


def seen(**values: float) -> dict[str, float]:
    return {"num_tokens": 100.0, "nonfinite_tokens": 0.0, "bit_equal_share": 1.0, "max_abs": 0.0} | values


def attestation(side: str, **changes: object) -> Attestation:
    values: dict = {
        "side": side,
        "policy_fingerprint": "f" * 64,
        "plan_hash": "p" * 64,
        "operators": {"rms_norm": "reference@1#aa", "linear": "reference@1#bb"},
        "versions": {"torch": "2.13.0"},
        "environment": {"VLLM_USE_DEEP_GEMM_E8M0": "0"},
        "tensor_parallel": 1,
        "scale_format": "fp32",
        "weights": {"a": "1"},
    }
    return Attestation(**(values | changes))


@pytest.mark.parametrize(
    ("guard", "good", "bad"),
    [
        (spec("max_abs", 0.0), {"max_abs": 0.0}, {"max_abs": 1e-7}),
        (spec("mean_abs", 0.01), {"mean_abs": 0.01}, {"mean_abs": 0.0101}),
        (spec("k3", 1e-3), {"k3": 9e-4}, {"k3": 2e-3}),
        # tolerance of bit_equal_share: the share that may differ
        (spec("bit_equal_share", 0.25), {"bit_equal_share": 0.75}, {"bit_equal_share": 0.74}),
        (spec("bit_equal_share", 0.0), {"bit_equal_share": 1.0}, {"bit_equal_share": 0.999}),
        (spec("max_abs", 0.1), {"max_abs": 0.1}, {"max_abs": math.inf}),
    ],
)
def test_beyond_tolerance_means_strictly_beyond(guard: schema.Guard, good: dict, bad: dict) -> None:
    """At the tolerance nothing happens; beyond it the action comes, with both numbers in the message."""
    verdict = Guard(guard).check(seen(**good))
    assert (verdict.action, verdict.message, verdict.violated) == ("none", "", False)
    verdict = Guard(guard).check(seen(**bad))
    assert (verdict.action, verdict.violated) == ("halt", True)
    assert f"guard.tolerance = {guard.tolerance:.4g}" in verdict.message
    assert guard.metric in verdict.message


@pytest.mark.parametrize("action", ["warn", "correct", "halt"])
def test_patience_counts_violations_in_a_row(action: str) -> None:
    """With patience 2: bad, good, bad, bad, bad -> none, none, none, act, act."""
    guard = Guard(spec(action=action, patience=2))
    verdicts = [guard.check(seen(max_abs=x)) for x in (1.0, 0.0, 1.0, 1.0, 1.0)]
    assert [v.action for v in verdicts] == ["none", "none", "none", action, action]
    assert [v.consecutive for v in verdicts] == [1, 0, 1, 2, 3]
    assert "guard.patience = 2" in verdicts[0].message


def test_only_correct_latches() -> None:
    """A correction stays on when the mismatch shrinks again; warn and halt leave no trace."""
    for action in ("warn", "correct", "halt"):
        guard = Guard(spec(action=action))
        guard.check(seen(max_abs=1.0))
        guard.check(seen(max_abs=0.0))
        assert guard.fired == (action == "correct")


def test_state_survives_a_checkpoint() -> None:
    """Count, latch and baseline go through JSON; the restored guard fires at the same check."""
    guard = Guard(spec(action="correct", patience=2))
    guard.check(seen(max_abs=1.0), Evidence(attestations={"train": attestation("train")}))
    other = Guard(spec(action="correct", patience=2))
    other.set_state(json.loads(json.dumps(guard.get_state())))
    changed = Evidence(attestations={"train": attestation("train", scale_format="ue8m0")})
    verdict = other.check(seen(max_abs=1.0), changed)
    assert verdict.action == "correct"
    assert "train side: CHANGED: scale_format: fp32 -> ue8m0" in verdict.message
    assert other.fired


def test_non_finite_tokens_are_a_violation_under_any_metric() -> None:
    """One NaN among 100 good tokens, and also when nothing else is left to compare."""
    verdict = Guard(spec("bit_equal_share", 1.0)).check(seen(nonfinite_tokens=1.0))
    assert verdict.action == "halt"
    assert "1 of 101 tokens have a non-finite log-probability" in verdict.message
    verdict = Guard(spec()).check({"num_tokens": 0.0, "nonfinite_tokens": 3.0})
    assert verdict.violated


def test_no_token_is_no_evidence() -> None:
    """An empty iteration neither counts nor resets, and says so."""
    guard = Guard(spec(patience=2))
    guard.check(seen(max_abs=1.0))
    verdict = guard.check({"num_tokens": 0.0, "nonfinite_tokens": 0.0})
    assert (verdict.action, verdict.violated, verdict.consecutive) == ("none", False, 1)
    assert "no token" in verdict.message
    assert guard.check(seen(max_abs=1.0)).action == "halt"


def test_a_missing_metric_is_an_error() -> None:
    """Silence about the guarded number must not pass for health."""
    with pytest.raises(KeyError, match="k3"):
        Guard(spec("k3")).check({"num_tokens": 5.0})


@pytest.mark.parametrize(("key", "value"), [("metric", "pearson"), ("action", "stop")])
def test_unknown_metric_or_action_is_refused(key: str, value: str) -> None:
    """Also when the spec does not come from a validated policy."""

    class Bare:
        metric, tolerance, action, patience = "k3", 0.1, "warn", 1

    bare = Bare()
    setattr(bare, key, value)
    with pytest.raises(ValueError, match=f"guard.{key} = '{value}'"):
        Guard(bare)


def test_message_names_the_side_that_changed() -> None:
    """Engine 1 restarted with other variables and operators: it is named with old and new values, the rest
    not."""
    guard = Guard(spec())
    guard.remember(Evidence(attestations={s: attestation(s) for s in ("train", "rollout/1", "rollout/2")}))
    now = {
        "train": attestation("train", weights={"a": "2"}),  # weights change every step: not a change of side
        "rollout/1": attestation(
            "rollout",
            environment={"VLLM_USE_DEEP_GEMM_E8M0": "1"},
            operators={"rms_norm": "vllm@1#cc", "linear": "reference@1#bb"},
        ),
        "rollout/2": attestation("rollout", informational={"pid": "7"}),
    }
    message = guard.check(seen(max_abs=1.0), Evidence(attestations=now)).message
    assert "train side: unchanged since the first check" in message
    assert "rollout/2 side: unchanged since the first check" in message
    assert "environment.VLLM_USE_DEEP_GEMM_E8M0: 0 -> 1" in message
    assert "operators.rms_norm: reference@1#aa -> vllm@1#cc" in message
    assert "train and rollout/1 attest different numerics: operators.rms_norm" in message
    assert "train and rollout/2" not in message


def test_message_names_foreign_weights() -> None:
    """Receipts: runners 1 and 3 hold what was sent, runner 2 other bytes in one tensor; more is no fault."""
    evidence = Evidence(
        sent={"a": "1", "b": "2"},
        held={
            "runner 1": {"a": "1", "b": "2"},
            "runner 2": {"a": "1", "b": "9"},
            "runner 3": {"a": "1", "b": "2", "c": "3"},
        },
    )
    assert changed_sides({}, evidence) == [
        "runner 2: holds OTHER BYTES than were sent for b",
    ]
    good = Evidence(sent={"a": "1"}, held={"runner 1": {"a": "1"}})
    assert changed_sides({}, good) == ["weights: every receipt matches what was sent"]


def test_without_evidence_it_says_so() -> None:
    """The guard never guesses a culprit."""
    assert "nothing tells which side changed" in Guard(spec()).check(seen(max_abs=1.0)).message


def test_hints_read_the_signature_of_known_causes() -> None:
    """One-sided Delta points at truncation; clean first positions point at attention; healthy numbers at
    nothing."""
    assert "top-p" in hints(seen(train_higher_share=0.0, bit_equal_share=0.0))[0]
    by_position = {"by_position/0-31/bit_equal_share": 1.0, "by_position/32-127/bit_equal_share": 0.4}
    assert "KV cache" in hints(seen(train_higher_share=0.4, bit_equal_share=0.9, **by_position))[0]
    assert hints(seen(train_higher_share=0.5, bit_equal_share=0.0)) == []
    assert hints(seen(train_higher_share=0.0, bit_equal_share=1.0)) == []
