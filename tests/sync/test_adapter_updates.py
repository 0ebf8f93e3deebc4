"""Updates of adapters alone: the base is sent once, and an engine proves that it holds it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from precision_policies.hashing import differing
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.models import CausalLM, PackedBatch
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.packed import PackedTensor, WeightSyncError, WeightUpdate
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.weights.base import base_hash, is_adapter
from tests.models.adapters import EVERYWHERE, adapted_model, shake

PARAMS = SamplingParams(n=3, max_tokens=10, seed=1)
PROMPTS = [[5, 6, 7], [8]]


def engine_for(model: CausalLM) -> Any:
    return make_engine("torch", model.config, model.policy, adapter=model.plan.adapter)


def mismatch(model: CausalLM, engine: Any) -> float:
    """The largest difference between the learner's and the engine's log-probs of sampled tokens."""
    worst = 0.0
    for prompt, row in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True):
        for done in row:
            ids = [*prompt, *done.token_ids.tolist()]
            with torch.no_grad():
                hidden = model(PackedBatch.from_sequences([ids[:-1]]))[len(prompt) - 1 :]
                logp = model.token_logprobs(hidden, torch.tensor(ids[len(prompt) :]))
            worst = max(worst, float((logp - torch.from_numpy(done.logprobs)).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("unified-fp8", "host"),
        ("bf16", "in process"),
        ("mixed-bf16-fp8", "host"),
    ],
)
def test_adapters_alone_bring_an_engine_up_to_date(policy: str, how: str) -> None:
    """After each of three pushes the engine's tokens are the learner's to the bit (mixed: as an engine with all weights
    sent anew), only A and B travelled after the first, and the receipt is over everything that is held."""
    model = adapted_model("qwen3", policy)
    engine = engine_for(model)
    first = export_weights(model, 1)
    engine.update_weights(first)
    base, manifest = base_hash(first.hashes), export_manifest(model, 1)
    assert engine.holds_base(base)
    for version in (2, 3):
        shake(model, version)
        manifest = export_manifest(model, version, manifest)
        assert manifest == export_manifest(model, version)
        assert base_hash(manifest.hashes) == base
        update: Any
        if how == "host":
            update = export_weights(model, version, base)
            assert all(map(is_adapter, update.tensors))
            update = WeightUpdate.assemble(update.split(5_000))
        else:
            source = partial(model.rollout_tensors, again=True, adapters_only=True)
            update = InProcessUpdate(manifest.of_adapters(), source)
        receipt = engine.update_weights(update)
        assert (receipt.version, engine.weights_version) == (version, version)
        assert differing(manifest.hashes, receipt.hashes) == {}
        assert differing(manifest.hashes, engine.attest().weights) == {}
        if policy != "mixed-bf16-fp8":
            assert mismatch(model, engine) == 0.0
            continue
        fresh = engine_for(model)
        fresh.update_weights(export_weights(model, version))
        one, other = (
            [c.logprobs.tobytes() for row in e.generate(PROMPTS, PARAMS) for c in row]
            for e in (engine, fresh)
        )
        assert one == other


def damaged(update: WeightUpdate) -> WeightUpdate:
    name = next(iter(update.tensors))
    tensor = update.tensors[name]
    data = tensor.data.copy()
    data[3] ^= 1
    return dataclasses.replace(
        update, tensors={**update.tensors, name: PackedTensor(data, tensor.dtype, tensor.shape)}
    )


def without_one(update: WeightUpdate) -> WeightUpdate:
    gone = next(iter(update.tensors))
    parts = ({n: t for n, t in part.items() if n != gone} for part in (update.tensors, update.hashes))
    return dataclasses.replace(update, tensors=next(parts), hashes=next(parts))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda u: dataclasses.replace(u, base="0" * 64), "push all weights first"),
        (damaged, "damaged on the way"),
        (without_one, "missing"),
        (lambda u: dataclasses.replace(u, base=None), "model.norm.weight: missing"),
        (lambda u: dataclasses.replace(u, plan_hash="0" * 64), "plan hash"),
    ],
)
def test_a_bad_update_of_adapters_changes_nothing(damage: Any, message: str) -> None:
    """Another base, a damaged byte, a factor less, adapters that pass for everything: refused, nothing has changed."""
    model = adapted_model("qwen3", "unified-fp8")
    engine = engine_for(model)
    first = export_weights(model, 1)
    engine.update_weights(first)
    shake(model, 2)
    good = export_weights(model, 2, base_hash(first.hashes))
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights(damage(good))
    assert engine.weights_version == 1
    assert differing(first.hashes, engine.attest().weights) == {}
    engine.update_weights(good)
    assert engine.weights_version == 2


def test_an_engine_that_lost_or_changed_its_base_asks_for_all() -> None:
    """A new engine, one that slept at level 2, and one with one changed code of the base hold no base."""
    model = adapted_model("qwen3", "unified-fp8")
    update = export_weights(model, 1)
    base = base_hash(update.hashes)
    engine = engine_for(model)
    assert not engine.holds_base(base)
    engine.update_weights(update)
    assert engine.holds_base(base)
    assert not engine.holds_base("0" * 64)
    code = engine.model.get_submodule("model.layers.0.mlp.up_proj").weight.view(torch.uint8)
    code[3, 3] ^= 1
    assert not engine.holds_base(base)
    with pytest.raises(WeightSyncError, match="push all weights first"):
        engine.update_weights(export_weights(model, 2, base))
    code[3, 3] ^= 1
    engine.sleep(2)
    engine.wake()
    assert not engine.holds_base(base)


def test_an_engine_without_adapters_refuses_them() -> None:
    """Both a full update of another plan and adapters alone are refused by name."""
    model = adapted_model("qwen3", "unified-fp8", EVERYWHERE)
    engine = make_engine("torch", model.config, model.policy)
    for base, message in ((None, "plan hash"), ("0" * 64, "built without")):
        with pytest.raises(WeightSyncError, match=message):
            engine.update_weights(export_weights(model, 1, base))
