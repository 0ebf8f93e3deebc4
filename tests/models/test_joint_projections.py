"""q, k, v and gate, up as one GEMM each, and quantisers inside norms and SiLU: another way to the same bits."""

import pytest
import torch
from transformers import Qwen3Config

from rllib_llm.models import PackedBatch, build_model, causal_lm
from rllib_llm.models.joint import JointProjections
from tests.models.cases import random_sequences

CONFIG = Qwen3Config(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384, vocab_size=128,
    num_hidden_layers=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pair(policy: str, device: str = "cpu") -> tuple[causal_lm.CausalLM, causal_lm.CausalLM]:
    """A learner's model and a rollout model with its weights."""
    learner = build_model(CONFIG, policy, "train")
    learner.initialise(0)
    learner.to(device)
    rollout = build_model(CONFIG, policy, "rollout").to(device)
    rollout.load_rollout_tensors(learner.rollout_tensors())
    return learner, rollout


def batch(device: str) -> PackedBatch:
    return PackedBatch.from_sequences(random_sequences((1, 3, 130), 128)).to(torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["unified-fp8", "unified-fp8-ue8m0", "bf16"])
def test_joined_and_fused_forwards_have_the_learners_bits(policy, device, monkeypatch):
    """Learner, rollout model with fused quantisers, and both with every projection on its own: one hidden state."""
    learner, rollout = pair(policy, device)
    rollout.fuse_operators()
    with torch.no_grad():
        expected = learner(batch(device))
        assert torch.equal(rollout(batch(device)), expected)
        monkeypatch.setattr("rllib_llm.models.joint.joinable", lambda shapes: False)
        apart = pair(policy, device)
        assert apart[0].model.layers[0].self_attn.q_proj.joint is None
        for model in apart:
            assert torch.equal(model(batch(device)), expected)


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_received_weights_stay_rows_of_one_tensor(policy):
    """Loading an update writes through; no copy of a joined weight is held, also after a move of the model."""
    learner, rollout = pair(policy)
    attention = rollout.model.layers[0].self_attn
    with torch.no_grad():
        before = rollout(batch("cpu"))
        for parameter in learner.parameters():
            parameter.mul_(1.5)
        rollout.load_rollout_tensors(learner.rollout_tensors())
        expected = learner(batch("cpu"))
        assert not torch.equal(before, expected)
        assert torch.equal(rollout(batch("cpu")), expected)
        moved = rollout.to(torch.device("cpu")).double().to(torch.bfloat16) if policy == "bf16" else rollout
        assert torch.equal(moved(batch("cpu")), expected)
    joint = attention.qkv.prepared()
    held = joint.whole.quantised.codes if policy == "unified-fp8" else joint.whole.values
    assert held.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


def test_hashes_do_not_see_where_a_weight_lies():
    """A rollout model reports the same hashes of its weights as the update that it received."""
    learner, rollout = pair("unified-fp8")
    other = build_model(CONFIG, "unified-fp8", "rollout")
    other.load_rollout_tensors(learner.rollout_tensors())
    assert rollout.weight_hashes() == other.weight_hashes()
    assert set(rollout.weight_hashes()) == {name for name, _ in learner.rollout_tensors()}


def test_fusing_is_for_the_rollout_side():
    """A learner's model refuses to fuse quantisers: its backward needs the values between."""
    with pytest.raises(ValueError, match="side"):
        pair("unified-fp8")[0].fuse_operators()


def test_groups_with_ragged_rows_are_multiplied_one_by_one():
    """k and v of 64 rows: nothing is joined there, and every projection keeps its own operand."""
    config = Qwen3Config(**(CONFIG.to_dict() | {"num_key_value_heads": 1}))
    model = build_model(config, "unified-fp8", "train")
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.qkv, JointProjections)
    assert not attention.qkv.joined
    assert attention.k_proj.joint is None
    assert model.model.layers[0].mlp.gate_up.joined


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("remembered", [False, True])
def test_fused_training_changes_no_gradient(device, remembered, monkeypatch):
    """Loss and every gradient are those of norms, projections and SiLU one by one; with checkpointing too."""
    results = []
    for one_function in (True, False):
        if not one_function:
            monkeypatch.setattr("rllib_llm.models.decoder.gated_feed_forward", None)  # not to be called
            monkeypatch.setattr("rllib_llm.models.decoder.FeedForward._one_function", lambda self: False)
            monkeypatch.setattr("rllib_llm.models.decoder.readable_as_codes", lambda formats: False)
        learner = build_model(CONFIG, "unified-fp8", "train", gradient_checkpointing=remembered)
        learner.initialise(0)
        learner.to(device)
        assert learner.model.layers[0].mlp._one_function() == one_function
        assert learner.model.layers[0].coded_input == (one_function, one_function)
        loss = learner.token_logprobs(learner(batch(device)), batch(device).input_ids).sum()
        loss.backward()
        results.append({"loss": loss.detach()} | {name: p.grad for name, p in learner.named_parameters()})
    for name, expected in results[1].items():
        assert torch.equal(results[0][name], expected), name
