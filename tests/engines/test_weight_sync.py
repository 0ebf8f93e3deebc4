import dataclasses

import numpy as np
import pytest
import torch

from precision_policies.hashing import differing
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.models import build_model
from rllib_llm.sync.export import export_weights
from rllib_llm.sync.packed import PackedTensor, WeightSyncError, WeightUpdate
from tests.engines.cases import engine_of
from tests.models.cases import CONFIGS, make_model

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(n=4, max_tokens=12, seed=1)
PROMPTS = [[5, 6, 7], [8]]


def outputs(engine):
    results = engine.generate(PROMPTS, PARAMS)
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.weights_version) for row in results for c in row]


def with_tensors(update: WeightUpdate, tensors, hashes=None) -> WeightUpdate:
    return dataclasses.replace(update, tensors=tensors, hashes=update.hashes if hashes is None else hashes)


def lost(update, name):
    return with_tensors(
        update,
        {n: t for n, t in update.tensors.items() if n != name},
        {n: h for n, h in update.hashes.items() if n != name},
    )


def flipped(update, name):
    data = update.tensors[name].data.copy()
    data[len(data) // 2] ^= 16
    tensor = update.tensors[name]
    return with_tensors(update, {**update.tensors, name: PackedTensor(data, tensor.dtype, tensor.shape)})


def recast(update, name):
    tensor = PackedTensor.pack(update.tensors[name].unpack().float())
    return with_tensors(update, {**update.tensors, name: tensor}, {**update.hashes, name: tensor.hash()})


def transposed(update, name):
    tensor = PackedTensor.pack(update.tensors[name].unpack().t())
    return with_tensors(update, {**update.tensors, name: tensor}, {**update.hashes, name: tensor.hash()})


K = "model.layers.1.self_attn.k_proj.weight"
DAMAGE = {
    "shard of a fused layer missing": (lambda u: lost(u, K), "k_proj.weight: missing"),
    "scales missing": (
        lambda u: lost(u, K + "_scale_inv"),
        "missing (while model.layers.1.self_attn.k_proj.weight came)",
    ),
    "one bit flipped": (lambda u: flipped(u, "model.layers.0.mlp.down_proj.weight"), "damaged on the way"),
    "one scale bit flipped": (lambda u: flipped(u, K + "_scale_inv"), "damaged on the way"),
    "wrong dtype": (
        lambda u: recast(u, "model.embed_tokens.weight"),
        "dtype float32, the plan says bfloat16",
    ),
    "transposed": (lambda u: transposed(u, K), "shape [128, 64], the plan says [64, 128]"),
    "unknown name": (
        lambda u: with_tensors(u, {**u.tensors, "lm_head.weight": u.tensors["model.embed_tokens.weight"]}),
        "lm_head.weight: unknown",
    ),
    "other policy": (lambda u: dataclasses.replace(u, policy_fingerprint="0" * 64), "policy fingerprint"),
    "other plan": (lambda u: dataclasses.replace(u, plan_hash="0" * 64), "plan hash"),
    "empty": (lambda u: with_tensors(u, {}, {}), "model.norm.weight: missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_update_leaves_the_old_weights_in_use(name):
    """Whatever is wrong with an update, it is refused by name before anything is applied: tokens, log-prob bits, hashes
    and version stay, and the next good update works."""
    damage, message = DAMAGE[name]
    old, new = make_model("qwen3", "unified-fp8", seed=0), make_model("qwen3", "unified-fp8", seed=9)
    engine = engine_of(old, version=4)
    before, held = outputs(engine), dict(engine.attest().weights)
    good = export_weights(new, 5)
    with pytest.raises(WeightSyncError) as caught:
        engine.update_weights(damage(good))
    assert message in str(caught.value)
    assert engine.weights_version == 4
    assert dict(engine.attest().weights) == held
    assert outputs(engine) == before
    engine.update_weights(good)
    assert outputs(engine) == outputs(engine_of(new, version=5))


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16", "mixed-bf16-fp8", "unified-fp8-ue8m0"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_receipt_is_taken_from_what_the_engine_holds(kind, policy):
    """Under every policy the receipt's hashes are those sent, over exactly the tensors that the plan asks for."""
    model = make_model(kind, policy)
    engine = make_engine("torch", model.config, policy)
    update = export_weights(model, 3)
    receipt = engine.update_weights(update)
    assert receipt.version == engine.weights_version == 3
    assert differing(update.hashes, receipt.hashes) == {}
    assert receipt.hashes.keys() == model.weight_specs().keys()
    assert (receipt.policy_fingerprint, receipt.plan_hash) == (model.policy.fingerprint, model.plan.hash)


def test_a_changed_engine_weight_shows_in_the_attestation():
    """The attestation hashes memory, not what was once received: one changed code is seen."""
    model = make_model("qwen3", "unified-fp8")
    engine = engine_of(model)
    update = export_weights(model, 1)
    assert differing(update.hashes, engine.attest().weights) == {}
    engine.model.get_submodule("model.layers.0.mlp.up_proj").weight.view(torch.uint8)[3, 3] ^= 1
    changed = differing(update.hashes, engine.attest().weights)
    assert list(changed) == ["model.layers.0.mlp.up_proj.weight"]


def test_twenty_updates_each_equal_a_fresh_engine():
    """After each of 20 consecutive updates the engine's output is bit-equal to a fresh engine's with those weights."""
    model = make_model("qwen3", "unified-fp8")
    engine = engine_of(model)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for version in range(2, 22):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        engine.update_weights(export_weights(model, version))
        got = outputs(engine)
        assert got == outputs(engine_of(model, version))
        seen.add(repr(got))
    assert len(seen) == 20


def test_chunked_transport_equals_the_whole():
    """An update that travelled in chunks of 10 kB gives the same receipt."""
    model = make_model("llama", "unified-fp8")
    update = export_weights(model, 1)
    engine = make_engine("torch", model.config, model.policy)
    receipt = engine.update_weights(WeightUpdate.assemble(update.split(10_000)))
    assert dict(receipt.hashes) == dict(update.hashes)


def test_update_from_read_only_memory(recwarn):
    """Arrays from Ray's object store are read-only: they are applied without a warning and not kept."""
    model = make_model("llama", "unified-fp8")
    update = export_weights(model, 1)
    for tensor in update.tensors.values():
        tensor.data.setflags(write=False)
    engine = make_engine("torch", model.config, model.policy)
    engine.update_weights(update)
    assert not [w for w in recwarn if "writ" in str(w.message)]
    pointers = {t.data.__array_interface__["data"][0] for t in update.tensors.values()}
    assert not pointers & {b.data_ptr() for b in engine.model.buffers()}


def test_master_dtype_rounding_is_what_travels():
    """A master between two bf16 numbers is sent as the one that the learner's forward uses."""
    model = make_model("qwen3", "bf16")
    name = "model.layers.0.input_layernorm.weight"
    with torch.no_grad():
        model.get_parameter(name).fill_(1.0 + 2.0**-10)
    sent = export_weights(model, 1).tensors[name].unpack()
    assert sent.dtype == torch.bfloat16
    assert torch.all(sent == 1.0)


def test_export_versions_count_from_one():
    """Version 0 is a checkpoint that an engine loaded; an export cannot claim it."""
    model = make_model("qwen3", "bf16")
    with pytest.raises(ValueError, match="count from 1"):
        export_weights(model, 0)


def test_size_of_an_update_is_about_half_of_bf16():
    """FP8 linears travel as one byte per weight plus one scale per 128 x 128."""
    fp8, bf16 = (export_weights(make_model("qwen2", p), 1) for p in ("unified-fp8", "bf16"))
    linear = sum(
        int(np.prod(r.shape))
        for r in build_model(CONFIGS["qwen2"](), "bf16").plan.modules
        if r.kind == "linear"
    )
    assert bf16.nbytes - fp8.nbytes == linear - sum(
        t.data.nbytes for n, t in fp8.tensors.items() if n.endswith("_scale_inv")
    )
