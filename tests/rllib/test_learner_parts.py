"""The parts of the learner on their own: optimiser, gradients, loss scale, packing, sharding, digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_kernels import LinearFormats, linear
from precision_kernels.dispatch import observed
from rllib_llm.algorithm.sharding import assign_minibatches, balance, make_shards
from rllib_llm.learner.digest import state_digest
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.micro_batch import MicroBatch, Shard, cut_by_tokens
from rllib_llm.learner.optimizer import LossScaler, PolicyAdamW, lr_factor
from rllib_llm.rollout.episode import TextEpisode
from tests.random_examples import examples

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def episodes_of(lengths: list[int], prompt: int = 3) -> list[TextEpisode]:
    """Episode i has i % prompt + 1 prompt tokens and lengths[i] others; every third of those is the environment's."""
    made = []
    for i, n in enumerate(lengths):
        mask = np.arange(n) % 3 != 2
        made.append(
            TextEpisode(
                prompt_ids=np.arange(i % prompt + 1, dtype=np.int64) + 1000 * i,
                completion_ids=np.arange(n, dtype=np.int64) + 100 * i,
                logprobs=np.where(mask, -0.5 - np.arange(n), 0.0).astype(np.float32),
                loss_mask=mask,
                reward=float(i),
                group_id=i,
                weights_version=1,
            )
        )
    return made


def shard_of(episodes: list[TextEpisode]) -> Shard:
    [shard] = make_shards(
        episodes, np.arange(len(episodes), dtype=np.float32), 1, np.zeros((len(episodes), 1), np.int64)
    )
    return Shard(**{name: torch.from_numpy(value) for name, value in vars(shard).items()})


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torchs_in_fp32(weight_decay: float) -> None:
    """With fp32 parameters and moments, twenty steps equal torch.optim.AdamW to fp32 rounding."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.randn(7, 5)) for _ in range(2))
    theirs.data.copy_(ours.data)
    a = PolicyAdamW([ours], lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    b = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay)
    for _ in range(20):
        grad = torch.randn(7, 5)
        theirs.grad = grad
        a.update({ours: grad.clone()})
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bf16_moments_keep_growing() -> None:
    """Moments stored in bf16 with fp32 arithmetic approach the gradient's square; bf16 arithmetic stalls early.

    beta2 = 0.99: bf16 carries 8 bits, so storing stalls where an update of 1 % of the gap is below half an ulp.
    """
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = PolicyAdamW([param], lr=0.0, betas=(0.9, 0.99), state_dtype=torch.bfloat16)
    for _ in range(500):
        optimizer.update({param: torch.ones(1)})
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.bfloat16
    assert optimizer.state[param]["exp_avg_sq"].item() > 0.7


def test_in_place_steps_change_the_version_of_a_parameter() -> None:
    """The model caches quantised weights by tensor version; a step must change it for fp32 and bf16 masters."""
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        before = param._version
        PolicyAdamW([param], lr=0.1).update({param: torch.ones(4)})
        assert param._version > before
        assert param.dtype == dtype


def test_state_of_another_shape_or_dtype_is_refused() -> None:
    """Moments that do not belong to the parameters are an error that says what differs."""
    small, large = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    one, other = PolicyAdamW([small], lr=0.1), PolicyAdamW([large], lr=0.1, state_dtype=torch.bfloat16)
    one.update({small: torch.ones(2)})
    with pytest.raises(ValueError, match=r"moments are torch.float32.*\(2,\), not \(3,\)"):
        other.set_exact_state(one.exact_state())


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """A thousand micro-batches of 0.001 add up to 1; in bf16 the sum would stick at 0.25."""
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    grads = Gradients([param])
    grads.zero()
    for _ in range(1000):
        (param * 0.001).sum().backward()
        grads.accumulate()
    assert grads.take()[param].item() == pytest.approx(1.0, rel=1e-2)


def test_micro_batches_add_fp8_weight_gradients_in_place() -> None:
    """The second micro-batch adds to the first one's .grad through the GEMM; zero() starts anew; frozen ones stay."""
    weight, frozen = torch.nn.Parameter(torch.randn(128, 128)), torch.nn.Parameter(torch.ones(2), False)
    grads = Gradients([weight, frozen])
    formats = LinearFormats("fp8", "fp8", "fp8", "fp8")
    seen: list[tuple[object, ...]] = []
    for _ in range(2):
        grads.zero()
        for seed in (1, 2):
            x = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
            with observed(lambda op, _, arguments, __: seen.append((op, *arguments[2:]))):
                linear(x, weight, None, formats).sum().backward()
            grads.accumulate()
        targets = [rest[0] for op, *rest in seen if op == "wgrad_fp8_matmul"]
        assert targets[-2] is None
        assert targets[-1] is not None
        assert targets[-1].data_ptr() == grads.take()[weight].data_ptr()
    assert grads.take()[frozen].abs().sum() == 0


def test_norm_is_not_finite_if_any_element_is_not() -> None:
    """One inf or NaN anywhere shows in the global norm; large finite values do not overflow it."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    grads = {params[0]: torch.full((3,), 1e30), params[1]: torch.ones(3)}
    assert np.isfinite(Gradients.unscale_and_norm(grads, 1.0))
    for bad in (float("nan"), float("inf")):
        grads[params[1]][1] = bad
        assert not np.isfinite(Gradients.unscale_and_norm(grads, 1.0))


def test_loss_scale_halves_on_overflow_and_grows_again() -> None:
    """Dynamic loss scaling; without a growth interval the scale stays 1."""
    scaler = LossScaler(1024.0, growth_interval=2)
    scaler.update(False)
    assert scaler.scale == 512.0
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 1024.0
    fixed = LossScaler()
    fixed.update(False)
    assert fixed.scale == 1.0


@pytest.mark.parametrize(
    ("step", "decay", "expected"),
    [
        (0, "constant", 0.25),
        (3, "constant", 1.0),
        (99, "constant", 1.0),
        (4, "linear", 1.0),
        (9, "linear", 0.5),
        (14, "linear", 0.0),
        (99, "linear", 0.0),
        (9, "cosine", 0.5),
        (14, "cosine", 0.0),
    ],
)
def test_lr_factor(step: int, decay: str, expected: float) -> None:
    """Four warm-up steps, then constant, or a decay that ends at step 14."""
    assert lr_factor(step, 4, decay, None if decay == "constant" else 14) == pytest.approx(expected)


@given(lengths=LENGTHS, budget=st.integers(1, 60))
@examples(60)
def test_micro_batches_hold_every_row_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    """First-fit decreasing loses no row and exceeds the budget only for a single row that is longer than it."""
    groups = cut_by_tokens(range(len(lengths)), lengths, budget)
    assert sorted(r for g in groups for r in g) == list(range(len(lengths)))
    assert all(len(g) == 1 or sum(lengths[r] for r in g) <= budget for g in groups)


@given(lengths=LENGTHS, budget=st.integers(1, 200))
@examples(40)
def test_packing_predicts_each_trained_token_from_the_one_before_it(lengths: list[int], budget: int) -> None:
    """Targets are the trained tokens, predict_at points at the token before each, and no token is lost."""
    episodes = episodes_of(lengths)
    shard = shard_of(episodes)
    seen = []
    for rows in cut_by_tokens(range(len(lengths)), shard.lengths.tolist(), budget):
        micro = MicroBatch.of(shard, rows)
        assert torch.equal(micro.packed.input_ids[micro.predict_at + 1], micro.targets)
        assert torch.equal(
            micro.packed.positions[micro.predict_at + 1] - 1, micro.packed.positions[micro.predict_at]
        )
        assert torch.equal(shard.token_ids[micro.slots], micro.targets)
        assert torch.equal(micro.advantages, torch.tensor(rows).float()[micro.sequence_ids])
        for i, row in enumerate(rows):
            own = micro.sequence_ids == i
            assert (
                micro.rollout_logprobs[own].tolist()
                == episodes[row].logprobs[episodes[row].loss_mask].tolist()
            )
        seen += micro.slots.tolist()
    assert sorted(seen) == torch.nonzero(shard.trained).flatten().tolist()


@given(lengths=LENGTHS, parts=st.integers(1, 4))
@examples(60)
def test_shards_are_balanced_by_tokens(lengths: list[int], parts: int) -> None:
    """Every row is in one shard, and the heaviest has at most one longest row more than the lightest."""
    shards = balance(lengths, parts, [0] * len(lengths))
    assert sorted(r for s in shards for r in s) == list(range(len(lengths)))
    loads = [sum(lengths[r] for r in s) for s in shards]
    assert max(loads) - min(loads) <= max(lengths)


@given(size=st.integers(1, 12), minibatches=st.integers(1, 4), epochs=st.integers(1, 3))
def test_minibatches_are_equal_and_new_in_every_epoch(size: int, minibatches: int, epochs: int) -> None:
    """Each step of an epoch trains the same number of sequences, each sequence once per epoch."""
    steps = assign_minibatches(size * minibatches, epochs, minibatches, seed=1)
    for epoch in range(epochs):
        assert np.bincount(steps[:, epoch], minlength=minibatches).tolist() == [size] * minibatches
    assert np.array_equal(steps, assign_minibatches(size * minibatches, epochs, minibatches, seed=1))


def test_an_empty_shard_keeps_its_dtypes() -> None:
    """A learner without samples gets arrays of length 0 with the right types."""
    shards = make_shards(episodes_of([4]), np.ones(1, np.float32), 2, np.zeros((1, 1), np.int64))
    empty = shards[1]
    assert (len(empty.lengths), empty.token_ids.dtype, empty.trained.dtype) == (0, np.int64, bool)
    assert empty.rollout_logprobs.dtype == empty.advantages.dtype == np.float32
    assert empty.minibatch.shape == (0, 1)


def test_digest_sees_values_order_names_and_dtypes() -> None:
    """Changing one bit, swapping two elements, renaming, or casting changes the digest."""
    base = {"w": torch.tensor([1.0, 2.0, 3.0])}
    digest = state_digest(base)
    assert state_digest({"w": base["w"].clone()}) == digest
    others = [
        {"w": torch.tensor([1.0, 3.0, 2.0])},
        {"w": torch.tensor([1.0, 2.0, 3.0000002])},
        {"v": base["w"]},
        {"w": base["w"].double()},
        {"w": base["w"].reshape(3, 1)},
        {"w": torch.tensor([1, 2, 3], dtype=torch.uint8)},
    ]
    assert len({digest, *map(state_digest, others)}) == 7


def test_episode_refuses_arrays_of_different_length() -> None:
    """Tokens, log-probabilities and mask belong together one by one."""
    with pytest.raises(ValueError, match="one length"):
        TextEpisode(
            np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.float32), np.ones(2, bool), 0.0, 0, 1
        )
