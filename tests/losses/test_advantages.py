"""Advantages, KL in the reward, overlong shaping and dynamic sampling against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rllib_llm.losses import informative_groups, overlong_penalty
from rllib_llm.losses.advantages import (
    ADVANTAGE_KINDS,
    group_advantages,
    kl_to_go,
    moments,
    standardised,
    uninformative_groups,
)
from tests.losses.batches import token_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 2.0, 4.0])
GROUPS = torch.tensor([5, 5, 5, 9, 9])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # group 5: mean 1/3, sample variance 1/3; group 9: mean 3, sample variance 2
        (
            "grpo",
            [2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(2), 1 / math.sqrt(2)],
        ),
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0]),
        ("rloo", [1 - 0.0, 0 - 0.5, 0 - 0.5, 2 - 4, 4 - 2]),
        ("reinforce++", [(r - 1.4) / statistics.stdev([1, 0, 0, 2, 4]) for r in (1, 0, 0, 2, 4)]),
        (
            "reinforce++_baseline",
            [c / statistics.stdev([2 / 3, -1 / 3, -1 / 3, -1, 1]) for c in (2 / 3, -1 / 3, -1 / 3, -1, 1)],
        ),
    ],
)
def test_hand_worked_advantages(kind: str, expected: list[float]) -> None:
    """Five rewards in two groups, by pencil."""
    assert group_advantages(REWARDS, GROUPS, kind).tolist() == pytest.approx(expected, rel=1e-5)


def test_equal_rewards_give_exactly_zero() -> None:
    """Three times 0.1 has a mean that is not 0.1 in binary; the rounding must not be divided by 1e-6."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0], dtype=dtype)
        for kind in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline"):
            assert group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), kind)[:3].tolist() == [0.0] * 3
    assert group_advantages(torch.full((3,), 0.1), torch.zeros(3).long(), "reinforce++").tolist() == [0.0] * 3


DENORMAL = 2.0**-149  # fp32's smallest number
EQUAL = [
    [DENORMAL, 0.0],
    [1e-40, -1e-40],
    [2.0**-126, 0.0],
    [1e-30, 0.0],
    [0.1 * 3, 0.3],
    [0.1 + 0.2 - 0.3, 0.0],
    [0.9 - 0.8 - 0.1, 0.0],
    [1.0, 1.0 + 2.0**-23],
    [1.0, 1.0 - 2.0**-24, 1.0],
    [-7.3, -7.3 * (1 + 2.0**-23), -7.3, -7.3],
    [1e30, 1e30 * (1 + 2.0**-23)],
    [3.4e38, 3.4e38],
    [-0.0, 0.0],
    [0.1] * 7,
]
DIFFERENT = [
    [1.0, 0.0],
    [1.0, 1.0 + 1e-5],
    [1e-5, 0.0],
    [1e-6, -1e-6],
    [1e30, 0.0],
    [1e30, 1e30 * (1 + 1e-5)],
    [1e38, -1e38],
    [1000.0, 1000.01],
    [1.0] * 63 + [1.0 + 1e-3],
]


def all_kinds(group: list[float], dtype: torch.dtype) -> dict[str, list[float]]:
    """Advantages of a group, of each kind that there is; the tokens' for one-token answers."""
    rewards, ids = torch.tensor(group, dtype=dtype), torch.arange(len(group))
    made = {kind: group_advantages(rewards, torch.zeros_like(ids), kind) for kind in ADVANTAGE_KINDS}
    made["tokens"] = token_advantages(rewards, None, torch.ones(len(group)), ids, 0.0)
    return {kind: advantages.tolist() for kind, advantages in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", EQUAL, ids=str)
def test_rewards_that_differ_by_rounding_are_equal(group: list[float], dtype: torch.dtype) -> None:
    """Advantages of every kind are exactly 0, and the group counts as one that cannot teach, everywhere."""
    for kind, advantages in all_kinds(group, dtype).items():
        assert advantages == [0.0] * len(group), kind
    rewards, ids = torch.tensor(group, dtype=dtype), torch.zeros(len(group), dtype=torch.int64)
    assert uninformative_groups(rewards, ids) == 1
    assert informative_groups(rewards, ids).resample == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", DIFFERENT, ids=lambda group: f"{group[0]}, {group[-1]}")
def test_a_difference_beyond_rounding_is_kept(group: list[float], dtype: torch.dtype) -> None:
    """No kind loses it, and the deviations are what the formulas say, whatever the scale."""
    exact = torch.tensor(group, dtype=dtype).tolist()
    deviation = statistics.stdev(exact)
    for kind, advantages in all_kinds(group, dtype).items():
        scale = {"dr_grpo": 1.0, "rloo": len(group) / (len(group) - 1)}.get(kind, 1 / (deviation + 1e-6))
        assert statistics.stdev(advantages) == pytest.approx(deviation * scale, rel=1e-4), kind
    rewards, ids = torch.tensor(group, dtype=dtype), torch.zeros(len(group), dtype=torch.int64)
    assert uninformative_groups(rewards, ids) == 0
    assert informative_groups(rewards, ids).resample == ()


def test_a_group_that_lost_all_but_one_sample_gets_zero() -> None:
    """Failed samples are dropped before grouping; the survivor has nothing to be compared with."""
    for kind in ("grpo", "dr_grpo", "rloo"):
        got = group_advantages(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0, 1, 1]), kind)
        assert got[0] == 0.0
        assert got[1] > 0 > got[2]


def test_groups_of_one_are_refused_when_there_is_nothing_else() -> None:
    """A run with group_size 1 would never learn; the message names the key. reinforce++ has no groups."""
    with pytest.raises(ValueError, match=r"rollout.group_size >= 2"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), "grpo")
    assert group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), "reinforce++")[0] > 0


def test_bad_rewards_kinds_and_shapes_are_listed_together() -> None:
    """Non-finite rewards are named by index, with the unknown kind in the same message."""
    with pytest.raises(ValueError, match=r"(?s)kind = 'ppo'.*rewards at \[1, 2\]"):
        group_advantages(torch.tensor([1.0, math.nan, math.inf]), torch.tensor([0, 0, 0]), "ppo")
    with pytest.raises(ValueError, match=r"\(3,\) and group_ids \(2,\)"):
        group_advantages(torch.zeros(3), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"rewards at \[0\] \(1 in all\) are not finite in fp32"):
        group_advantages(torch.tensor([1e200, 0.0], dtype=torch.float64), torch.zeros(2).long())


def test_an_empty_batch_gives_no_advantages() -> None:
    """N = 0 is an empty answer, not an error."""
    for kind in ADVANTAGE_KINDS:
        assert group_advantages(torch.zeros(0), torch.zeros(0).long(), kind).shape == (0,)


def test_groups_that_cannot_teach_are_counted() -> None:
    """Groups: {1, 0} informative, {0.1, 0.1} not, {5} alone (also not)."""
    rewards, ids = torch.tensor([1.0, 0.0, 0.1, 0.1, 5.0]), torch.tensor([0, 0, 1, 1, 2])
    assert uninformative_groups(rewards, ids) == 2


def test_kl_in_the_reward_of_each_token() -> None:
    """A'_t = R - 0.1 * (KL of this and all later tokens): [0.925, 0.975], [-0.1]; then standardised."""
    kl = torch.tensor([0.5, 0.25, math.nan, 1.0])
    mask, ids = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 0, 1])
    got = token_advantages(torch.tensor([1.0, 0.0]), kl, mask, ids, 0.1)
    raw = [0.925, 0.975, -0.1]
    expected = [(a - statistics.mean(raw)) / statistics.stdev(raw) for a in raw]
    assert got.tolist() == pytest.approx([expected[0], expected[1], 0.0, expected[2]], rel=1e-4)


def test_token_advantages_want_adjacent_tokens() -> None:
    """The sum to the end of the response needs packed order; interleaved responses are refused."""
    with pytest.raises(ValueError, match="ascending"):
        token_advantages(torch.zeros(2), torch.ones(3), torch.ones(3), torch.tensor([0, 1, 0]), 0.1)


def test_shards_standardise_like_the_whole() -> None:
    """Two ranks that add their moments get the advantages of one process: REINFORCE++ on any number of
    learners."""
    g = torch.Generator().manual_seed(0)
    rewards, kl = torch.randn(4, generator=g), torch.randn(20, generator=g)
    mask, ids = torch.rand(20, generator=g) < 0.8, torch.arange(20) // 5
    whole = token_advantages(rewards, kl, mask, ids, 0.3)
    shards = [(slice(0, 10), rewards[:2]), (slice(10, 20), rewards[2:])]
    values = [r.double()[ids[:10]] - 0.3 * kl_to_go(kl[rows], mask[rows], ids[:10], 2) for rows, r in shards]
    sums = sum(moments(v, mask[rows]) for v, (rows, _) in zip(values, shards, strict=True))
    parts = [standardised(v, mask[rows], sums) for v, (rows, _) in zip(values, shards, strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)


def test_overlong_penalty_of_the_paper() -> None:
    """With L_max 20480 and a buffer of 4096: 0 up to 16384, -0.5 half way, -1 at the end and beyond."""
    lengths = torch.tensor([1, 16384, 16384 + 2048, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20480, 4096, factor=2.0).tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    for buffer in (0, 20481):
        with pytest.raises(ValueError, match=f"buffer = {buffer}"):
            overlong_penalty(lengths, 20480, buffer)


def test_dynamic_sampling_keeps_groups_with_two_different_scores() -> None:
    """All right, all wrong and alone are resampled; mixed stays."""
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    groups = torch.tensor([8, 8, 4, 4, 2, 2, 6])
    got = informative_groups(scores, groups)
    assert got.keep.tolist() == [False, False, False, False, True, True, False]
    assert got.resample == (4, 6, 8)
    with pytest.raises(ValueError, match=r"scores \[0\]"):
        informative_groups(torch.tensor([math.nan, 1.0]), torch.tensor([0, 0]))
