"""The planner's modules are those of the real models of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from precision_policies import load_policy
from tests.policies.models import DENSE, small

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MOE = ("mixtral", "qwen2_moe", "qwen3_moe")


def real_model(config: dict[str, Any]) -> Any:
    """The model without memory for its weights."""
    keys = {k: v for k, v in config.items() if k != "model_type"}
    real = transformers.AutoConfig.for_model(config["model_type"], **keys, pad_token_id=0)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(real)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_dense_plans_have_the_real_modules(family: str, variant: dict[str, Any]) -> None:
    """Names, shapes and biases equal those of the transformers model, from raw dict and from its config alike."""
    config = small(family, **variant)
    model = real_model(config)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    policy = load_policy("unified-fp8")
    plan = policy.resolve(config)
    planned: dict[str, tuple[int, ...]] = {}
    for row in plan:
        planned[f"{row.name}.weight"] = row.shape
        if row.bias:
            planned[f"{row.name}.bias"] = row.shape[:1]
    assert planned == parameters
    assert plan["lm_head"].tied_to == ("model.embed_tokens" if model.config.tie_word_embeddings else None)
    assert policy.resolve(model.config).modules == plan.modules


@pytest.mark.parametrize("family", MOE)
def test_moe_plans_count_the_real_weights(family: str) -> None:
    """transformers 5 holds experts as one tensor per projection; numbers of weights per layer agree."""
    config = small(family)
    model = real_model(config)
    plan = load_policy("unified-fp8").resolve(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        real = sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))
        planned = 0
        for row in plan:
            if row.name.startswith(prefix):
                size = 1
                for n in row.shape:
                    size *= n
                planned += size + (row.shape[0] if row.bias else 0)
        assert planned == real
    others = {r.name for r in plan if r.kind not in ("expert", "router")}
    names = {name.rsplit(".", 1)[0] for name, _ in model.named_parameters()}
    assert others - {"lm_head"} <= names
    assert load_policy("unified-fp8").resolve(model.config).modules == plan.modules
