"""Importance corrections against hand-worked ratios and a plain-Python implementation."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_policies import schema
from rllib_llm.losses.corrections import KINDS, Correction, active_correction, correction_weights
from tests.losses.batches import finite
from tests.random_examples import examples

BOUNDS = {
    "none": (None, None),
    "tis_token": (None, 2.0),
    "tis_sequence": (None, 2.0),
    "icepop": (0.5, 5.0),
    "mis_token": (None, 2.0),
    "mis_sequence": (0.25, 2.0),
    "geometric_mask": (0.9, 1.2),
    "product_mask": (0.5, 2.0),
}
IDS = torch.tensor([0, 0, 0, 1, 1])
RATIOS = torch.tensor([3.0, 0.5, 1.0, 0.4, 0.4])  # products 1.5 and 0.16, geometric means 1.145 and 0.4
ROLLOUT = torch.full((5,), -3.0)
ONES = torch.ones(5)


def weights(correction: Correction, ratios: torch.Tensor = RATIOS, mask: torch.Tensor = ONES) -> list[float]:
    return correction_weights(correction, ROLLOUT + ratios.log(), ROLLOUT, mask, IDS)[0].tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction("none"), [1, 1, 1, 1, 1]),
        (Correction("tis_token", None, 2.0), [2, 0.5, 1, 0.4, 0.4]),
        (Correction("tis_sequence", None, 1.25), [1.25, 1.25, 1.25, 0.16, 0.16]),
        (Correction("icepop", 0.45, 5.0), [3, 0.5, 1, 0, 0]),
        (Correction("mis_token", None, 2.0), [0, 0.5, 1, 0.4, 0.4]),
        (Correction("mis_token", 0.45, 2.0), [0, 0.5, 1, 0, 0]),
        (Correction("mis_sequence", None, 2.0), [1.5, 1.5, 1.5, 0.16, 0.16]),
        (Correction("mis_sequence", 0.2, 2.0), [1.5, 1.5, 1.5, 0, 0]),
        (Correction("geometric_mask", 0.9, 1.2), [1, 1, 1, 0, 0]),
        (Correction("geometric_mask", 0.3, 1.1), [0, 0, 0, 1, 1]),
        (Correction("product_mask", 0.5, 2.0), [1, 1, 1, 0, 0]),
        (Correction("tis_token", None, 2.0, veto=0.45), [2, 0.5, 1, 0, 0]),
        (Correction("none", veto=0.6), [0, 0, 0, 0, 0]),
    ],
)
def test_hand_worked_weights(correction: Correction, expected: list[float]) -> None:
    """Ratios 3, 0.5, 1 in one response and 0.4, 0.4 in another."""
    assert weights(correction) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_on_policy_samples_are_never_corrected(kind: str) -> None:
    """Equal log-probs give weight exactly 1 everywhere: `unified` does not need and does not feel a
    correction."""
    lower, upper = BOUNDS[kind]
    assert weights(Correction(kind, lower, upper, veto=1e-4), torch.ones(5)) == [1.0] * 5


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
@examples(40)
def test_weights_equal_a_plain_python_implementation(kind: str, data: st.DataObject) -> None:
    """Random log-ratios up to +-3, masks and lengths, with and without a veto."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    d = data.draw(st.lists(finite(-3, 3), min_size=len(ids), max_size=len(ids)))
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    veto = data.draw(st.sampled_from([None, 0.3]))
    lower, upper = BOUNDS[kind]
    expected = [_python(kind, lower, upper, veto, t, ids, d, mask) for t in range(len(ids))]
    if any(e is None for e in expected):
        return  # a ratio within rounding of a bound
    old = torch.tensor(d)
    old[~torch.tensor(mask)] = math.nan
    got, _ = correction_weights(
        Correction(kind, lower, upper, veto), old, torch.zeros(len(d)), torch.tensor(mask), torch.tensor(ids)
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


def _python(kind, lower, upper, veto, t, ids, d, mask) -> float | None:
    """The weight of token t in Python floats; None when a ratio sits on a bound."""
    if not mask[t]:
        return 1.0
    mine = [d[u] for u in range(len(d)) if ids[u] == ids[t] and mask[u]]
    level = {"tis_sequence": sum, "mis_sequence": sum, "product_mask": sum}.get(kind)
    x = level(mine) if level else sum(mine) / len(mine) if kind == "geometric_mask" else d[t]
    bounds = [math.log(b) for b in (lower, upper) if b]
    if any(abs(x - b) < 1e-5 for b in bounds) or (veto and any(abs(m - math.log(veto)) < 1e-5 for m in mine)):
        return None
    if veto and min(mine) < math.log(veto):
        return 0.0
    if kind == "none":
        return 1.0
    inside = (not lower or x >= math.log(lower)) and x <= math.log(upper)
    if kind.startswith("tis"):
        return min(math.exp(x), upper)
    if kind.endswith("mask"):
        return 1.0 if inside else 0.0
    return math.exp(x) if inside else 0.0


def test_raw_and_applied_statistics_are_both_reported() -> None:
    """A metric of truncated weights only is dead (verl#6806): raw max is 3, applied max 2, one of five is
    above."""
    _, m = correction_weights(Correction("tis_token", None, 2.0), ROLLOUT + RATIOS.log(), ROLLOUT, ONES, IDS)
    got = {k: v.item() for k, v in m.items()}
    assert got["raw_max"] == pytest.approx(3.0, rel=1e-5)
    assert got["weight_max"] == 2.0
    assert got["raw_mean"] == pytest.approx(5.3 / 5, rel=1e-5)
    assert got["weight_mean"] == pytest.approx(4.3 / 5, rel=1e-5)
    assert got["fraction_high"] == pytest.approx(0.2)
    assert got["fraction_low"] == 0.0
    assert got["raw_ess"] == pytest.approx(5.3**2 / (5 * (9 + 0.25 + 1 + 0.32)), rel=1e-5)
    assert got["weight_ess"] == pytest.approx(4.3**2 / (5 * (4 + 0.25 + 1 + 0.32)), rel=1e-5)


def test_masks_count_what_they_drop() -> None:
    """geometric_mask drops the second response: 2 of 5 tokens below, 2 of 5 zero; a veto is counted apart."""
    _, m = correction_weights(
        Correction("geometric_mask", 0.9, 1.2), ROLLOUT + RATIOS.log(), ROLLOUT, ONES, IDS
    )
    assert (m["fraction_low"].item(), m["zero_fraction"].item()) == pytest.approx((0.4, 0.4))
    _, m = correction_weights(Correction("none", veto=0.45), ROLLOUT + RATIOS.log(), ROLLOUT, ONES, IDS)
    assert (m["veto_fraction"].item(), m["zero_fraction"].item()) == pytest.approx((0.4, 0.4))


def test_long_responses_do_not_overflow() -> None:
    """4 000 tokens of mean log-ratio 0.01 are e^40 (trl#4772), and 0.1 would be e^400: truncated, masked,
    finite."""
    ids = torch.zeros(4000, dtype=torch.int64)
    for step in (0.01, 0.1):
        old, rollout = torch.full((4000,), -1.0), torch.full((4000,), -1.0 - step)
        for kind, expected in (("tis_sequence", 2.0), ("mis_sequence", 0.0), ("product_mask", 0.0)):
            lower = 0.5 if kind == "product_mask" else None
            w, m = correction_weights(Correction(kind, lower, 2.0), old, rollout, torch.ones(4000), ids)
            assert set(w.tolist()) == {expected}
            assert all(math.isfinite(v.item()) for v in m.values())
        w, m = correction_weights(
            Correction("geometric_mask", 0.99, 1.02), old, rollout, torch.ones(4000), ids
        )
        assert set(w.tolist()) == {1.0 if step == 0.01 else 0.0}


def test_bounds_are_compared_before_the_clamp() -> None:
    """A ratio of e^25 is outside upper = e^22 although its clamped value e^20 is not."""
    w, _ = correction_weights(
        Correction("icepop", 0.5, math.exp(22)),
        torch.tensor([0.0]),
        torch.tensor([-25.0]),
        torch.ones(1),
        torch.zeros(1).long(),
    )
    assert w.item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_token_without_a_finite_pair_gets_no_weight(bad: float) -> None:
    """On either side; token kinds drop the token, sequence masks drop the response, and it is counted."""
    rollout = ROLLOUT.clone()
    rollout[1] = bad
    for old, roll in ((ROLLOUT, rollout), (rollout, ROLLOUT)):
        w, m = correction_weights(Correction("tis_token", None, 2.0), old, roll, ONES, IDS)
        assert w.tolist() == [1, 0, 1, 1, 1]
        assert m["nonfinite_fraction"].item() == pytest.approx(0.2)
        w, _ = correction_weights(Correction("mis_sequence", None, 2.0), old, roll, ONES, IDS)
        assert w.tolist() == [0, 0, 0, 1, 1]


def test_nothing_to_correct() -> None:
    """An empty mask gives weights of one and no metrics; T = 0 works too."""
    w, m = correction_weights(Correction("tis_token", None, 2.0), ROLLOUT, ROLLOUT - 1, torch.zeros(5), IDS)
    assert (w.tolist(), m) == ([1.0] * 5, {})
    empty = torch.zeros(0)
    w, m = correction_weights(Correction("tis_sequence", None, 2.0), empty, empty, empty, empty.long())
    assert (w.shape, m) == ((0,), {})


@pytest.mark.parametrize(
    ("correction", "named"),
    [
        (Correction("tis"), r"correction.kind = 'tis': no such kind -> use one of none, tis_token"),
        (Correction("tis_token"), "correction.upper = None: kind tis_token needs this bound"),
        (Correction("tis_token", 0.5, 2.0), "correction.lower = 0.5: kind tis_token has no such bound"),
        (Correction("icepop", 5.0, 0.5), "correction.lower = 5.0: is not below upper 0.5"),
        (Correction("mis_token", -1.0, 0.0), r"(?s)lower = -1.0.*upper = 0.0"),
        (Correction("none", veto=-0.1), "correction.veto = -0.1"),
    ],
)
def test_bad_corrections_are_refused_by_key(correction: Correction, named: str) -> None:
    """Kind and bounds are named with their values, all at once."""
    with pytest.raises(ValueError, match=named):
        weights(correction)


def test_the_kinds_are_those_of_the_policy_schema() -> None:
    """A kind the policy accepts and the code does not know, or the reverse, cannot be released."""
    assert set(KINDS) == set(get_args(schema.CorrectionKind))


def test_when_a_correction_acts() -> None:
    """ "always" from the start; "guard" only once the guard has fired; "none" never."""

    def spec(kind: str, when: str) -> schema.Correction:
        return schema.Correction(
            kind=kind, lower=None, upper=2.0, veto=None, when=when, accept_uncorrected=False
        )

    always, guarded = spec("tis_token", "always"), spec("tis_token", "guard")
    assert active_correction(always, guard_fired=False) is always
    assert active_correction(guarded, guard_fired=False) is None
    assert active_correction(guarded, guard_fired=True) is guarded
    assert active_correction(spec("none", "always"), guard_fired=True) is None
    assert active_correction(Correction("none", veto=1e-4), guard_fired=False) is not None
