"""A push whose scales no quantiser makes is refused, by whatever transport it comes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rllib_llm.engines import make_engine
from rllib_llm.sync.export import export_weights
from rllib_llm.sync.packed import PackedTensor, WeightSyncError
from rllib_llm.sync.receiver import InProcessUpdate
from rllib_llm.sync.verify import ScaleRange, WeightManifest
from rllib_llm.weights.format import TensorSpec, hash_tensors
from tests.models.cases import make_model

NAME = "model.layers.1.mlp.up_proj.weight_scale_inv"
BAD = {
    "zero": 0.0, "minus zero": -0.0, "negative": -0.01, "nan": float("nan"), "infinite": float("inf"),
    "minus infinite": -float("inf"), "subnormal": 1e-40, "below the floor": 1e-31, "beyond bfloat16": 3e38,
}  # fmt: skip


def damaged(model: Any, value: float) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in model.rollout_tensors()}
    tensors[NAME].view(-1)[-1] = value
    return tensors


@pytest.mark.parametrize("transport", ["update", "in-process"])
@pytest.mark.parametrize(("policy", "value"), [
    *(("unified-fp8", value) for value in BAD.values()),
    *(("unified-fp8-ue8m0", value) for value in (0.0, 0.75, 0.00781251, -0.5, float("nan"))),
])  # fmt: skip
def test_scales_that_no_quantiser_makes_are_refused_by_name(
    transport: str, policy: str, value: float
) -> None:
    """The hashes fit, the scale does not: refused with name and value, and the old weights stay in use."""
    model = make_model("qwen3", policy)
    engine = make_engine("torch", model.config, policy)
    good = export_weights(model, 1)
    engine.update_weights(good)
    tensors = damaged(model, value)
    hashes = hash_tensors(tensors)
    if transport == "update":
        packed = {name: PackedTensor.pack(tensor) for name, tensor in tensors.items()}
        bad: Any = dataclasses.replace(good, version=2, tensors=packed, hashes=hashes)
    else:
        specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in good.tensors.items()}
        manifest = WeightManifest(2, good.policy_fingerprint, good.plan_hash, specs, hashes)
        bad = InProcessUpdate(manifest, lambda: iter(tensors.items()))
    with pytest.raises(WeightSyncError, match=r"up_proj\.weight_scale_inv: 1 of .* scales"):
        engine.update_weights(bad)
    assert engine.weights_version == 1
    assert dict(engine.attest().weights) == dict(good.hashes)


@pytest.mark.parametrize("policy", ["unified-fp8", "unified-fp8-ue8m0"])
@pytest.mark.parametrize("filling", [0.0, 1e-30, 3.3e38, float("nan"), float("inf")])
def test_every_scale_that_the_quantiser_makes_passes(policy: str, filling: float) -> None:
    """Of weights that are zero, tiny, near the largest bfloat16, and not finite."""
    model = make_model("qwen3", policy)
    with torch.no_grad():
        model.get_parameter(NAME.removesuffix("_scale_inv")).fill_(filling)
    allowed = ScaleRange.of(model.policy)
    for name, tensor in model.rollout_tensors():
        if name.endswith("_scale_inv"):
            assert allowed.problems(name, tensor) == []
