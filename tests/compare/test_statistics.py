"""Statistics over seeds against closed forms, exhaustive enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest

from rllib_llm.compare import statistics as st


def test_permutation_p_is_that_of_all_splits():
    """The p-value equals the one counted over every split of the pooled runs."""
    a, b = [0.9, 0.8, 0.85, 0.7], [0.6, 0.75, 0.5, 0.65]
    pooled, observed = np.array(a + b), abs(np.mean(a) - np.mean(b))
    splits = [
        abs(pooled[list(c)].mean() - np.delete(pooled, list(c)).mean())
        for c in itertools.combinations(range(8), 4)
    ]
    expected = np.mean([value >= observed - 1e-12 for value in splits])
    assert st.compare_pair("a", "b", a, b).p == pytest.approx(expected)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 3), (4, 4), (5, 5), (3, 6)])
def test_smallest_p_is_reached_by_the_most_extreme_outcome(n, m):
    """Every run of one arm above every run of the other gives exactly `smallest_p`."""
    pair = st.compare_pair("a", "b", [10.0 + i for i in range(n)], [float(i) / 10 for i in range(m)])
    assert pair.p == pytest.approx(st.smallest_p(n, m)) == pytest.approx(min(1.0, 2 / math.comb(n + m, n)))
    assert pair.better.value == 1.0


@pytest.mark.parametrize(("arms", "needed"), [(2, 4), (3, 5), (4, 5), (5, 6)])
def test_seeds_needed(arms, needed):
    """One seed fewer could never pass the adjusted test, that many can."""
    pairs = arms * (arms - 1) // 2
    assert st.seeds_needed(pairs) == needed
    assert st.smallest_p(needed - 1, needed - 1) * pairs > st.ALPHA >= st.smallest_p(needed, needed) * pairs


def test_three_arms_are_ranked_from_five_seeds_on():
    """Three clearly separated arms: four seeds give no order, five give all three pairs."""

    def finals(seeds):
        return {
            arm: [level + 0.001 * s for s in range(seeds)]
            for arm, level in (("a", 0.1), ("b", 0.5), ("c", 0.9))
        }

    four, five = st.rank(finals(4)), st.rank(finals(5))
    assert (four.enough, four.told_apart, four.needed) == (False, (), 5)
    assert five.enough
    assert len(five.told_apart) == 3
    assert all(pair.adjusted <= st.ALPHA for pair in five.told_apart)


def test_holm_multiplies_and_never_decreases():
    """The adjustment of (0.01, 0.04, 0.03) is (0.03, 0.06, 0.06), from the definition; tests not made stay None."""
    assert st._holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert st._holm([None, 0.02]) == [None, 0.02]


def test_ties_count_half():
    """Equal runs: probability of improvement 1/2, difference 0, p = 1."""
    pair = st.compare_pair("a", "b", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert (pair.better.value, pair.difference.value, pair.p) == (0.5, 0.0, 1.0)


def test_one_run_has_no_interval_and_no_p():
    """A single run is reported without pretending to know its spread."""
    assert st.estimate_mean([0.4]) == st.Estimate(0.4)
    pair = st.compare_pair("a", "b", [0.4], [0.2, 0.3])
    assert (pair.p, pair.difference.low, pair.better.low) == (None, None, None)
    assert not st.rank({"a": [0.4], "b": [0.2]}).enough


def test_the_interval_covers_as_often_as_it_says():
    """Of 300 samples of 20 normal values about 95 % of the intervals hold the true mean (binomial 3-sigma: > 91 %)."""
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(300):
        estimate = st.estimate_mean(rng.normal(size=20))
        hits += estimate.low <= 0.0 <= estimate.high
    assert (
        0.89 < hits / 300 < 0.985
    )  # percentile bootstrap of 20 values: nominal 0.95, known to be about 0.93


def test_the_band_draws_runs_as_wholes():
    """Runs that differ by a constant: the band is equally wide everywhere and holds the mean."""
    values = np.linspace(0, 1, 30)[None] + np.array([0.0, 0.1, 0.2, 0.3, 0.4])[:, None]
    mean, low, high = st.band(values)
    assert np.allclose(mean, values.mean(axis=0))
    assert np.ptp(high - low) < 1e-12
    assert np.all((low < mean) & (mean < high))


def test_the_same_data_give_the_same_numbers():
    """The bootstrap's random seed is fixed: a report can be rebuilt."""
    finals = {"a": [0.1, 0.4, 0.3], "b": [0.2, 0.25, 0.5]}
    assert st.rank(finals) == st.rank(finals)
