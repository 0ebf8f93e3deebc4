"""The aggregator: exact over micro-batches, ranks and environments."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.mismatch import MismatchMonitor, metrics
from tests.random_examples import examples


def batch(seed: int, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    rollout = -4 * torch.rand(n, generator=g)
    train = (rollout + 0.1 * torch.randn(n, generator=g)).clamp(max=0)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return train, rollout, torch.rand(n, generator=g) < 0.7, ids


@given(data=st.data(), seed=st.integers(0, 2**16))
@examples(30)
def test_any_split_gives_the_metrics_of_the_whole(data: st.DataObject, seed: int) -> None:
    """Responses in any micro-batches on two merged monitors equal one call on everything, p99 and buckets
    too."""
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=6))
    train, rollout, mask, ids = batch(seed, sizes)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1))))
    ranks = (MismatchMonitor(), MismatchMonitor())
    for low, high in zip([0, *cuts], [*cuts, len(sizes)], strict=True):
        chosen = (ids >= low) & (ids < high)
        ranks[data.draw(st.integers(0, 1))].add(
            train[chosen], rollout[chosen], mask[chosen], ids[chosen] - low
        )
    ranks[0].merge(ranks[1])
    assert ranks[0].metrics() == pytest.approx(metrics(train, rollout, mask, ids), rel=1e-9, abs=1e-12)


def test_environments_are_told_apart() -> None:
    """The environment with the fault shows it, the other does not; per-rank name orders may differ."""
    a, b = MismatchMonitor(), MismatchMonitor()
    ids, ones = torch.tensor([0, 0, 1]), torch.ones(3)
    rollout = torch.full((3,), -1.0)
    a.add(rollout, rollout, ones, ids, ["algebra", "chess"])
    b.add(torch.tensor([-1.5, -1.5, -1.0]), rollout, ones, ids, ["chess", "algebra"])
    a.merge(b)
    got = a.metrics(buckets=False)
    assert got["by_environment/algebra/max_abs"] == 0.0
    assert got["by_environment/algebra/num_tokens"] == 3
    assert got["by_environment/chess/max_abs"] == 0.5
    assert got["by_environment/chess/mean_abs"] == pytest.approx(1.0 / 3)
    assert got["num_tokens"] == 6


def test_mixing_named_and_unnamed_batches() -> None:
    """Responses without a name count overall and in no environment."""
    m = MismatchMonitor()
    one, zero = torch.tensor([-1.0]), torch.zeros(1).long()
    m.add(one, one, torch.ones(1), zero)
    m.add(one, one, torch.ones(1), zero, ["algebra"])
    got = m.metrics(buckets=False)
    assert (got["num_tokens"], got["by_environment/algebra/num_tokens"]) == (2, 1)


def test_empty_clear_and_transport() -> None:
    """Nothing added gives counts only; clear forgets; a monitor pickles (it travels through the object
    store)."""
    m = MismatchMonitor()
    assert m.metrics() == {"num_tokens": 0.0, "nonfinite_tokens": 0.0}
    m.add(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0]), torch.ones(2), torch.zeros(2).long())
    assert pickle.loads(pickle.dumps(m)).metrics() == m.metrics()
    assert m.metrics()["nonfinite_tokens"] == 1.0
    m.clear()
    assert m.metrics() == {"num_tokens": 0.0, "nonfinite_tokens": 0.0}


def test_too_few_names_are_refused() -> None:
    """Two responses and one name: says both numbers."""
    with pytest.raises(ValueError, match="1 environment names for 2 sequences"):
        MismatchMonitor().add(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([0, 1]), ["a"])
