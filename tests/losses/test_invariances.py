"""What must not change the update: order, padding, micro-batches, number of learners. Property tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rllib_llm.losses import LOSSES, Loss, make_loss
from rllib_llm.losses.advantages import ADVANTAGE_KINDS, group_advantages
from tests.losses.batches import Response, batches, finite, pack, token_advantages
from tests.random_examples import examples

NAMES = sorted(LOSSES)
CONFIG = {"kl_coeff": 0.2, "entropy_coeff": 0.05, "max_tokens": 9, "clip_low": 0.2, "clip_high": 0.3}


def update(
    loss: Loss, batch: list[Response], learners: Sequence[Sequence[Sequence[int]]]
) -> dict[str, torch.Tensor]:
    """What a learner group does: every micro-batch adds its sum and count, one division by the global count.

    learners: per learner its micro-batches, each a list of response indices. Returns the normalised loss
    and the gradient of every response's tokens.
    """
    gradients: dict[int, torch.Tensor] = {}
    total, count = torch.zeros(()), torch.zeros(())
    for micro_batches in learners:
        for chosen in micro_batches:
            inputs = pack([batch[i] for i in chosen])
            out = loss(inputs)
            out.loss_sum.backward()
            total = total + out.loss_sum.detach()
            count = count + loss.count(inputs.mask, inputs.sequence_ids, inputs.num_sequences)
            for position, i in enumerate(chosen):
                gradients[i] = inputs.logp.grad[inputs.sequence_ids == position]
    divisor = count.clamp(min=1)
    return {"loss": total / divisor} | {f"grad {i}": g / divisor for i, g in sorted(gradients.items())}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of fp32 additions (30 terms of size <= 300: 300 * 2^-24 * 30 = 5e-4 relative to
    300)."""
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=2e-5, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches(min_size=2), data=st.data())
@examples(25)
def test_order_micro_batches_and_learners_do_not_matter(
    name: str, batch: list[Response], data: st.DataObject
) -> None:
    """Any permutation of the responses, cut anywhere into micro-batches on 1 or 2 learners, gives one
    update."""
    loss = make_loss(name, **CONFIG)
    whole = update(loss, batch, [[range(len(batch))]])
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch) - 1))))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    split = data.draw(st.integers(0, len(pieces)))
    assert_same(whole, update(loss, batch, [pieces[:split], pieces[split:]]))


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches(), extra=st.integers(1, 4))
@examples(25)
def test_padding_does_not_matter(name: str, batch: list[Response], extra: int) -> None:
    """Masked NaN tokens after a response, and whole masked responses, change neither loss, gradient nor
    metrics."""
    loss = make_loss(name, **CONFIG)
    blank = [0.0] * extra

    def padded(r: Response) -> Response:
        columns = [r.logp, r.old, r.ref, r.entropy, r.weight]
        logp, old, ref, entropy, weight = ([*c, *blank] for c in columns)
        return Response(logp, old, [*r.mask, *[False] * extra], r.advantage, ref, entropy, weight)

    dummy = Response(blank, blank, [False] * extra, 1.0, blank, blank, blank)
    plain, wide = pack(batch), pack([*(padded(r) for r in batch), dummy])
    a, b = loss(plain), loss(wide)
    a.loss_sum.backward()
    b.loss_sum.backward()
    torch.testing.assert_close(a.loss_sum, b.loss_sum, rtol=1e-5, atol=1e-5)
    kept = wide.mask
    torch.testing.assert_close(plain.logp.grad[plain.mask], wide.logp.grad[kept], rtol=1e-5, atol=1e-5)
    assert not wide.logp.grad[~kept].any()
    assert loss.count(plain.mask, plain.sequence_ids, len(batch)) == loss.count(
        wide.mask, wide.sequence_ids, len(batch) + 1
    )
    for key, (total, count) in a.metrics.items():
        torch.testing.assert_close((total, count), b.metrics[key], rtol=1e-5, atol=1e-5)


def test_an_empty_micro_batch_contributes_nothing() -> None:
    """A rank whose shard has no trained token adds loss 0 with zero gradients and count 0, for every loss."""
    for name in NAMES:
        loss = make_loss(name, **CONFIG)
        inputs = pack([Response([-1.0], [-1.0], [False], 1.0, [-1.0], [1.0], [1.0])])
        out = loss(inputs)
        out.loss_sum.backward()
        assert out.loss_sum.item() == 0.0
        assert inputs.logp.grad.tolist() == [0.0]
        assert loss.count(inputs.mask, inputs.sequence_ids, 1).item() == 0.0
        assert all(count.item() == 0 and total.item() == 0 for total, count in out.metrics.values())


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@given(data=st.data())
@examples(30)
def test_advantages_do_not_depend_on_the_order_of_samples_or_on_labels(
    kind: str, data: st.DataObject
) -> None:
    """Permuting samples permutes advantages; renaming groups changes nothing."""
    groups = data.draw(
        st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda g: len(set(g)) < len(g))
    )
    rewards = torch.tensor(data.draw(st.lists(finite(-3, 3), min_size=len(groups), max_size=len(groups))))
    ids = torch.tensor(groups)
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    rename = torch.tensor(data.draw(st.permutations([7, -2, 900, 3])))
    expected = group_advantages(rewards, ids, kind)
    got = group_advantages(rewards[order], rename[ids][order], kind)
    torch.testing.assert_close(got, expected[order], rtol=1e-5, atol=1e-6)


@given(data=st.data())
@examples(30)
def test_group_advantages_ignore_a_constant_added_to_a_groups_rewards(data: st.DataObject) -> None:
    """Within-group kinds see only differences inside the group."""
    rewards = torch.tensor(data.draw(st.lists(st.integers(-4, 4), min_size=6, max_size=6))).float()
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    shift = torch.tensor(data.draw(st.lists(st.integers(-8, 8), min_size=2, max_size=2))).float()[ids]
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline"):
        torch.testing.assert_close(
            group_advantages(rewards + shift, ids, kind),
            group_advantages(rewards, ids, kind),
            rtol=1e-5,
            atol=1e-6,
        )


def one_token(reward: float) -> Response:
    return Response([-1.0], [-1.0], [True], reward, [-1.0], [1.0], [1.0])


@given(batch=batches(min_size=2), beta=finite(0.0, 0.5))
@example(batch=[one_token(2.0**-149), one_token(0.0)], beta=0.0)
@example(batch=[one_token(1e-5), one_token(0.0)], beta=0.0)
@example(batch=[one_token(2.0**-23 + 1), one_token(1.0)], beta=0.5)
@examples(30)
def test_token_advantages_are_standardised_over_trained_tokens(batch: list[Response], beta: float) -> None:
    """(A' - mean) / (sample deviation + 1e-6) over the trained tokens, all 0 when A' differs by rounding only, 0 on
    masked ones; A' = R - beta times the KL from the token on."""
    inputs = pack(batch)
    rewards = torch.tensor([r.advantage for r in batch])
    kl = inputs.old_logp - inputs.ref_logp
    got = token_advantages(rewards, kl, inputs.mask, inputs.sequence_ids, beta)
    assert not got[~inputs.mask].any()
    raw, start = [], 0
    for r in batch:
        own = kl[start : start + len(r.mask)].tolist()
        start += len(r.mask)
        raw += [r.advantage - beta * math.fsum(own[u] for u in r.trained if u >= t) for t in r.trained]
    if len(raw) < 2:
        assert not got.any()
        return
    mean, deviation = statistics.fmean(raw), statistics.stdev(raw)
    limit = max(2.0**-20 * math.sqrt(statistics.fmean(x * x for x in raw)), 2.0**-24)
    assume(not 0.99 < deviation / limit < 1.01)
    expected = [0.0 if deviation < limit else (x - mean) / (deviation + 1e-6) for x in raw]
    assert got[inputs.mask].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
