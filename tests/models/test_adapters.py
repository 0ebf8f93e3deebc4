"""Models with low-rank adapters: learner and rollout compute one function, and only the adapters are trained."""

from __future__ import annotations

import copy

import pytest
import torch

from precision_policies import AdapterSpec
from rllib_llm.models import PackedBatch, build_model, load_pretrained
from rllib_llm.models.adapters import factors as factors_of
from rllib_llm.models.adapters import initialise_adapters, switched_off
from tests.edge_cases import assert_same_bits
from tests.models.adapters import EVERYWHERE, adapted_model, rollout_of, shake
from tests.models.cases import CONFIGS, next_tokens, random_sequences

POLICIES = ["unified-fp8", "bf16", "fp16", "mixed-bf16-fp8"]
SPECS = [
    AdapterSpec(1, 1, ("q_proj",)),
    AdapterSpec(256, 3, ("v_proj", "down_proj")),
    AdapterSpec(12, 5, ("model.layers.1.mlp.gate_proj", "o_proj"), use_rslora=True),
]


def batch() -> PackedBatch:
    return PackedBatch.from_sequences(random_sequences((1, 3, 40), 128))


CASES = [
    *((policy, "qwen3", EVERYWHERE) for policy in POLICIES),
    *(("unified-fp8", kind, EVERYWHERE) for kind in ("llama", "llama3-rope-biases")),
    *(("unified-fp8", "qwen3", spec) for spec in SPECS),
]


@pytest.mark.parametrize(("policy", "kind", "spec"), CASES, ids=str)
def test_both_sides_compute_one_function(policy: str, kind: str, spec: AdapterSpec) -> None:
    """Learner and rollout, also with fused operators, have equal bits; mixed policies differ by their base only."""
    model = adapted_model(kind, policy, spec)
    rollout, tokens = rollout_of(model), batch()
    with torch.no_grad():
        expected = model(tokens)
        base = build_model(CONFIGS[kind](), policy, "train")
        base.initialise(0)
        assert not torch.equal(base(tokens), expected)
        with switched_off(model):
            assert_same_bits(model(tokens), base(tokens), "switched off")
        assert_same_bits(model(tokens), expected, "switched on again")
        found = rollout(tokens)
        rollout.fuse_operators()
        assert_same_bits(rollout(tokens), found, "fused")
        assert torch.equal(found, expected) is (policy != "mixed-bf16-fp8")


@pytest.mark.parametrize("policy", ["unified-fp8", "fp16", "mixed-bf16-fp8"])
def test_only_adapters_have_master_weights_and_gradients(policy: str) -> None:
    """All parameters are A or B, of the policy's master dtype, and all get gradients; the base has two bytes or less
    a number, and the rollout's bytes of it are those of a model without adapters."""
    model = adapted_model("qwen3", policy)
    tokens = batch()
    logp = model.token_logprobs(model(tokens), next_tokens(tokens))
    logp.sum().backward()
    for name, parameter in model.named_parameters():
        assert ".lora_" in name
        assert parameter.grad is not None
        assert float(parameter.grad.abs().sum()) > 0
    assert {name for name, _, _ in model.masters()} == {name for name, _ in model.named_parameters()}
    held = dict(model.named_buffers())
    assert all(t.element_size() <= 2 or name.endswith("scale_inv") for name, t in held.items())
    plain = build_model(CONFIGS["qwen3"](), policy, "train")
    plain.initialise(0)
    exported = dict(model.rollout_tensors())
    for name, tensor in plain.rollout_tensors():
        assert_same_bits(exported.pop(name), tensor, name)
    assert set(exported) == set(dict(model.rollout_tensors(adapters_only=True)))


def test_a_frozen_base_is_quantised_once() -> None:
    """Optimiser steps and exports of the adapters make no operand of the base anew, and A and B's anew."""
    model = adapted_model("qwen3", "unified-fp8")
    linear, joint = model.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.gate_up
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = batch()
    model.token_logprobs(model(tokens), next_tokens(tokens)).sum().backward()
    before = linear.prepared(), joint.prepared(), linear.adapter.prepared()
    first = model(tokens).detach()
    optimiser.step()
    list(model.rollout_tensors(adapters_only=True))
    assert not torch.equal(model(tokens), first)
    after = linear.prepared(), joint.prepared(), linear.adapter.prepared()
    assert [a is b for a, b in zip(before, after, strict=True)] == [True, True, False]


def test_split_masters_train_the_same_numbers() -> None:
    """Under split_float32 the adapters' FP32 numbers lie in halves; the function is that of float32 masters."""
    split = {"extends": "unified-fp8", "master_dtype": "split_float32"}
    one, other = adapted_model("qwen3", "unified-fp8"), adapted_model("qwen3", split)
    assert_same_bits(other(batch()).detach(), one(batch()).detach())
    for (name, a), (_, b) in zip(factors_of(one), factors_of(other), strict=True):
        assert_same_bits(b.master("weight"), a.master("weight"), name)


def test_gradients_do_not_depend_on_checkpointing() -> None:
    """gradient_checkpointing gives the same bits."""
    gradients = []
    for option in (False, True):
        model = adapted_model("llama", "unified-fp8", gradient_checkpointing=option)
        tokens = batch()
        model.token_logprobs(model(tokens), next_tokens(tokens)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert_same_bits(one, other)


def test_less_is_kept_for_the_backward_than_without_adapters() -> None:
    """Nothing is kept for a weight gradient of the base: at rank 8 all saved tensors take fewer bytes."""

    def kept_bytes(model) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        held = [*model.parameters(), *model.buffers()]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            alive = model(batch())
        assert alive.requires_grad
        return sum(n for p, n in sizes.items() if p not in {t.untyped_storage().data_ptr() for t in held})

    plain = build_model(CONFIGS["llama"](), "bf16", "train")
    plain.initialise(0)
    assert kept_bytes(adapted_model("llama", "bf16")) < kept_bytes(plain)


def test_an_initialisation_is_the_same_on_both_sides_and_for_one_seed() -> None:
    """A of a seed is one A, on learner and engine; other seeds and kinds give others; B is zero."""
    train, rollout = (
        load_pretrained("tiny-chain", "bf16", side, adapter=EVERYWHERE) for side in ("train", "rollout")
    )
    for init, seed in (("default", 0), ("default", 7), ("gaussian", 0)):
        for model in (train, rollout):
            initialise_adapters(model, init, seed)
        for (name, a), (_, b) in zip(factors_of(train), factors_of(rollout), strict=True):
            assert_same_bits(b.weight, a.weight.detach().bfloat16(), name)
            assert bool((a.weight == 0).all()) is name.endswith("lora_B")
    (_, first), *_ = factors_of(train)
    values = first.weight.detach().clone()
    initialise_adapters(train, "gaussian", 1)
    assert not torch.equal(first.weight, values)


def test_a_copy_has_adapters_of_its_own() -> None:
    """deepcopy: a change of the copy's A and B leaves the original's function alone."""
    model = adapted_model("qwen3", "unified-fp8")
    before = model(batch()).detach()
    twin = copy.deepcopy(model)
    assert_same_bits(twin(batch()).detach(), before)
    shake(twin, 5)
    assert not torch.equal(twin(batch()), before)
    assert_same_bits(model(batch()).detach(), before)
