"""Low-rank adapters in vLLM, as part of our model there: exactly on-policy, also after updates of adapters alone."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from precision_policies import AdapterSpec
from precision_policies.hashing import differing
from rllib_llm.models import build_model
from rllib_llm.sync.export import export_manifest, export_weights
from rllib_llm.sync.packed import WeightSyncError
from rllib_llm.weights.base import base_hash, is_adapter
from tests.models.adapters import shake
from tests.vllm.cases import DEVICE, SAMPLING, deltas, prompts, ragged_config, start

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test` runs this folder in .venv-vllm", allow_module_level=True
    )


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
def test_adapters_are_exactly_on_policy_in_vllm(policy: str, ray_for_engines: None) -> None:
    """Largest |Δ| is 0 with the first weights and after each update of adapters; the base goes once, and vLLM holds
    exactly what the learner states. Adapters on another base are refused and change nothing."""
    spec = AdapterSpec(8, 16, use_rslora=True)
    model = build_model(ragged_config("qwen3"), policy, "train", adapter=spec)
    model.initialise(0)
    shake(model, 0)
    model.to(DEVICE)
    asked = prompts(1)
    with start(model.config, policy, adapter=spec) as engine:
        first = export_weights(model, 1)
        engine.update_weights(first)
        base = base_hash(first.hashes)
        assert engine.holds_base(base)
        seen = []
        for version, kind in ((1, "group"), (2, "truncated"), (3, "greedy")):
            if version > 1:
                shake(model, version)
                update = export_weights(model, version, base)
                assert all(map(is_adapter, update.tensors))
                with pytest.raises(WeightSyncError, match="push all weights first"):
                    engine.update_weights(export_weights(model, version, "0" * 64))
                receipt = engine.update_weights(update)
                held = export_manifest(model, version).hashes
                assert differing(held, receipt.hashes) == {}
                assert differing(held, engine.attest().weights) == {}
            answers = engine.generate(asked, SAMPLING[kind])
            delta = deltas(model, asked, answers, SAMPLING[kind])
            assert len(delta) > 40
            assert np.abs(delta).max() == 0
            seen.append(engine.generate(asked, SAMPLING["greedy"])[0][0].logprobs.tobytes())
        assert len(set(seen)) == 3
