"""Masters in two halves and narrow moments in the learner: bits, gradients, checkpoints, changes of precision."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch

import precision_kernels as pk
from precision_policies import load_policy, schema
from precision_policies.memory import MASTER_BYTES, MOMENT_BYTES
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.module import _with_parts
from rllib_llm.learner.optimizer import PolicyAdamW
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.causal_lm import CausalLM, build_model
from tests.edge_cases import assert_same_bits
from tests.models.cases import CONFIGS

MOMENTS = get_args(schema.MomentDtype)
TIED = [False, True]


def model_of(policy: str, master: str, moments: str, tied: bool) -> tuple[CausalLM, PolicyAdamW, Gradients]:
    """A small model with random masters that have all 24 bits, and what trains it."""
    config = CONFIGS["qwen3"]()
    config = config.__class__(**config.to_dict() | {"tie_word_embeddings": tied})
    rule = load_policy({"extends": policy, "master_dtype": master, "optimizer_state_dtype": moments})
    model = build_model(config, rule, "train")
    model.initialise(seed=3)
    low = {getattr(m, s): (lambda m=m, s=s: m.low_half(s)) for _, m, s in model.masters() if m.low_half(s)}
    params = list(model.parameters())
    return (
        model,
        PolicyAdamW(params, 1e-3, weight_decay=0.1, state_dtype=moments, low_halves=low),
        Gradients(params),
    )


def train(parts: tuple[CausalLM, PolicyAdamW, Gradients], steps: range) -> None:
    """Steps of two micro-batches each; the second adds to the gradients of the first."""
    model, optimizer, gradients = parts
    vocab = model.architecture.vocab
    for step in steps:
        gradients.zero()
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            ids = torch.randint(0, vocab, (12,), generator=generator)
            batch = PackedBatch(ids, torch.tensor([*range(5), *range(7)]), torch.tensor([0, 5, 12]))
            logp = model.token_logprobs(model(batch), ids.roll(-1))
            assert isinstance(logp, torch.Tensor)
            (-logp.mean()).backward()
            gradients.accumulate()
        taken = gradients.take()
        assert all(g.dtype == torch.float32 for g in taken.values())
        optimizer.update(taken, 0.5, gradients.release)
        assert not taken
        assert all(p.grad is None for p in gradients.params)


def masters(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: module.master(suffix).clone() for name, module, suffix in model.masters()}


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_split_masters_train_as_fp32_ones(policy: str, tied: bool) -> None:
    """Gradients, masters and what is sent to engines are those of FP32 masters, bit for bit, after each step."""
    whole, split = (model_of(policy, m, "float32", tied) for m in ("float32", "split_float32"))
    for step in range(3):
        expected = masters(whole[0])
        for name, tensor in masters(split[0]).items():
            assert_same_bits(tensor, expected[name], f"{name} before step {step}")
        sent = dict(split[0].rollout_tensors())
        for name, tensor in whole[0].rollout_tensors():
            assert_same_bits(sent[name].view(torch.uint8), tensor.view(torch.uint8), name)
        for parts in (whole, split):
            train(parts, range(step, step + 1))
    low = [b for n, b in split[0].named_buffers() if n.endswith("_low")]
    assert any(b.count_nonzero() for b in low)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", get_args(schema.MasterDtype))
def test_a_resumed_optimiser_continues_bit_by_bit(master: str, moments: str) -> None:
    """State saved after two steps and loaded into new objects gives the third step's bits, random rounding included."""
    parts = model_of("unified-fp8", master, moments, True)
    train(parts, range(2))
    weights, saved = copy.deepcopy(dict(parts[0].state_dict())), parts[1].exact_state()
    other = model_of("unified-fp8", master, moments, True)
    other[0].load_state_dict(weights, strict=True)
    other[1].set_exact_state(saved)
    for each in (parts, other):
        train(each, range(2, 4))
    assert parts[0].state_dict().keys() == other[0].state_dict().keys()
    for name, tensor in parts[0].state_dict().items():
        assert_same_bits(other[0].state_dict()[name], tensor, name)
    for a, b in zip(parts[1].exact_state()["state"], other[1].exact_state()["state"], strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a if k != "step")
        assert a["step"] == b["step"] == 4


@pytest.mark.parametrize("master", get_args(schema.MasterDtype))
@pytest.mark.parametrize("moments", MOMENTS)
def test_state_takes_the_bytes_that_the_table_says(master: str, moments: str) -> None:
    """Bytes of the tensors that are there, for a weight of whole blocks, against `precision_policies.memory`."""
    model, optimizer, gradients = model_of("bf16", master, moments, True)
    train((model, optimizer, gradients), range(1))
    _, module, suffix = next(
        entry for entry in model.masters() if getattr(entry[1], entry[2]).numel() % 1024 == 0
    )
    param = getattr(module, suffix)
    held = [param, *(module.low_half(suffix) or ())]
    assert sum(t.nbytes for t in held) == MASTER_BYTES[master] * param.numel()
    states = [t for t in optimizer.state[param].values() if torch.is_tensor(t)]
    assert sum(t.nbytes for t in states) == 2 * MOMENT_BYTES[moments] * param.numel()


@pytest.mark.parametrize("before", MOMENTS)
@pytest.mark.parametrize("after", MOMENTS)
def test_moments_change_their_format_when_that_is_allowed(before: str, after: str) -> None:
    """Refused unless asked for; then close to the old ones, and equal from a narrow format to float32."""
    param = torch.nn.Parameter(torch.randn(300))
    one, other = (PolicyAdamW([param], lr=0.1, state_dtype=f) for f in (before, after))
    one.update({param: torch.randn(300)})
    saved = one.exact_state()
    if before != after:
        with pytest.raises(ValueError, match=f"moments are .*{before}, the policy wants .*{after}"):
            other.set_exact_state(saved)
    other.set_exact_state(saved, cast=True)
    for name in ("exp_avg", "exp_avg_sq"):
        old, new = (
            pk.load_moment(o._moment(o.state[param], name, name.endswith("sq"))) for o in (one, other)
        )
        exact = before == after or after == "float32"
        torch.testing.assert_close(
            new, old, rtol=0 if exact else 0.5, atol=0 if exact else old.abs().max().item() / 60
        )


def test_unknown_formats_of_moments_are_refused() -> None:
    """The error lists the formats there are."""
    with pytest.raises(ValueError, match=r"blockwise_8bit.*got 'int4'"):
        PolicyAdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1, state_dtype="int4")


def test_masters_change_their_parts_without_a_loss() -> None:
    """A state of FP32 masters becomes one of halves, and back, exactly; what is alike stays as it is."""
    whole, split = (model_of("bf16", m, "float32", False)[0] for m in ("float32", "split_float32"))
    halves = _with_parts(dict(whole.state_dict()), split.state_dict())
    assert halves.keys() == split.state_dict().keys()
    split.load_state_dict(halves, strict=True)
    for name, tensor in masters(split).items():
        assert_same_bits(tensor, masters(whole)[name], name)
    back = _with_parts(dict(split.state_dict()), whole.state_dict())
    assert back.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert_same_bits(back[name], tensor, name)
    assert _with_parts(back, whole.state_dict()).keys() == back.keys()


def test_a_new_optimiser_reads_halves_after_a_move() -> None:
    """Buffers that were replaced, as moving a module does, are the ones that are updated."""
    model, optimizer, gradients = model_of("bf16", "split_float32", "float32", False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()
    train((model, optimizer, gradients), range(1))
    assert any(b.count_nonzero() for n, b in model.named_buffers() if n.endswith("_low"))
