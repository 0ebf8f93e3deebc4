"""Copies of a model: by pickle, by torch.save and by deepcopy."""

import copy
import io
import pickle

import pytest
import torch

from rllib_llm.models import PackedBatch
from tests.models.cases import make_model, random_sequences

BATCH = PackedBatch.from_sequences(random_sequences((3, 9), 128))


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture
def model():
    """After a forward: its gate and up are one GEMM's operand, its q, k and v are not."""
    model = make_model("qwen3", "unified-fp8")
    layer = model.model.layers[0]
    assert (layer.mlp.gate_up.joined, layer.self_attn.qkv.joined) == (True, False)
    model(BATCH)
    return model


@pytest.mark.parametrize("copied", [by_pickle, by_torch_save, copy.deepcopy])
def test_a_copy_computes_the_same_bits_and_then_its_own(model, copied):
    """After an fp8 forward too; another weight in the copy counts there and nowhere else."""
    before = model(BATCH)
    twin = copied(model)
    assert torch.equal(twin(BATCH), before)
    for parameter in twin.parameters():
        parameter.data.mul_(1.5)
    twin.forget_operands()
    assert not torch.equal(twin(BATCH), before)
    assert torch.equal(model(BATCH), before)


def test_what_was_made_from_the_weights_does_not_travel(model):
    """A pickle is as large after a forward as without its operands, and the model still has them."""
    layer = model.model.layers[0]
    held = layer.mlp.gate_up.prepared(), layer.self_attn.q_proj.prepared()
    after = len(pickle.dumps(model))
    assert (layer.mlp.gate_up.prepared(), layer.self_attn.q_proj.prepared()) == held
    model.forget_operands()
    assert after == len(pickle.dumps(model))
