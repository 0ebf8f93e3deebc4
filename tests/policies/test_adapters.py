"""Low-rank adapters in policy, plan, graph and contract."""

from __future__ import annotations

import dataclasses
import json
import math

import networkx
import pytest

from precision_policies import AdapterSpec, Plan, PolicyError, PrecisionPolicy, available, load_policy
from precision_policies.adapters import MAX_RANK, formats_of
from precision_policies.graph import training_graph
from precision_policies.graph_compare import compare
from tests.policies.models import QWEN3_8B, small

EVERYWHERE = AdapterSpec(8, 16)


@pytest.mark.parametrize("name", sorted(available()))
def test_what_null_means_is_no_difference(name: str) -> None:
    """The section said in full as null means it, null, and a file without the key are one policy in numbers."""
    policy = load_policy(name)
    said = load_policy({"extends": name, "adapters": dataclasses.asdict(formats_of(policy.compute_dtype))})
    old = policy.to_dict()
    del old["adapters"]
    assert said.fingerprint == policy.fingerprint == PrecisionPolicy.from_dict(old).fingerprint
    assert policy.diff(said) == []
    assert said.resolve(QWEN3_8B, EVERYWHERE).hash == policy.resolve(QWEN3_8B, EVERYWHERE).hash


def test_formats_that_do_not_go_with_the_compute_dtype_are_refused() -> None:
    """Every key of the section is named in one error."""
    fp16 = dataclasses.asdict(formats_of("float16"))
    with pytest.raises(PolicyError) as caught:
        load_policy({"extends": "bf16", "adapters": fp16})
    keys = {v.key for v in caught.value.violations}
    assert keys == {f"adapters.{key}" for key in ("weight", "inner", "dgrad", "wgrad", "saved")}


@pytest.mark.parametrize(
    "spec",
    [
        EVERYWHERE,
        AdapterSpec(1, 1),
        AdapterSpec(MAX_RANK, 3, ("q_proj", "model.layers.0.mlp.down_proj")),
        AdapterSpec(12, 5.5, use_rslora=True),
    ],
)
def test_a_plan_has_two_rows_for_each_adapter(spec: AdapterSpec) -> None:
    """A is [rank, in], B [out, rank], only where the targets say; the plan survives JSON with its hash."""
    policy = load_policy("unified-fp8")
    plan, base = policy.resolve(QWEN3_8B, spec), policy.resolve(QWEN3_8B)
    added = [row for row in plan if row.kind == "adapter"]
    assert [row for row in plan if row.kind != "adapter"] == list(base)
    expected = {row.name: row for row in base if row.kind == "linear"}
    if spec.targets != "all-linear":
        ends = ("q_proj", "model.layers.0.mlp.down_proj")
        expected = {name: row for name, row in expected.items() if name.endswith(ends)}
    assert {row.name for row in added} == {f"{n}.{f}" for n in expected for f in ("lora_A", "lora_B")}
    for name, row in expected.items():
        assert plan[f"{name}.lora_A"].shape == (spec.rank, row.shape[1])
        assert plan[f"{name}.lora_B"].shape == (row.shape[0], spec.rank)
    assert plan.hash != base.hash
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_all_that_changes_the_function_changes_the_hash() -> None:
    """Rank, scale and targets; not how the scale or the targets were said."""
    policy = load_policy("bf16")

    def hash_of(*arguments: object, **keywords: object) -> str:
        return policy.resolve(QWEN3_8B, AdapterSpec(*arguments, **keywords)).hash  # type: ignore[arg-type]

    first = hash_of(16, 16)
    others = [hash_of(8, 8), hash_of(16, 32), hash_of(16, 16, ("q_proj",)), hash_of(16, 16, use_rslora=True)]
    assert len({first, *others}) == 5
    assert hash_of(16, 4, use_rslora=True) == first
    assert hash_of(4, 4, ["v_proj", "q_proj"]) == hash_of(4, 4, ("q_proj", "v_proj", "v_proj"))
    assert AdapterSpec(9, 6, use_rslora=True).scale == 6 / math.sqrt(9)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rank": 0}, "adapter.rank"),
        ({"rank": 257}, "adapter.rank"),
        ({"rank": 8.0}, "adapter.rank"),
        ({"rank": True}, "adapter.rank"),
        ({"alpha": 0}, "adapter.alpha"),
        ({"alpha": math.inf}, "adapter.alpha"),
        ({"alpha": math.nan}, "adapter.alpha"),
        ({"targets": "q_proj"}, "adapter.targets"),
        ({"targets": []}, "adapter.targets"),
        ({"use_rslora": 1}, "adapter.use_rslora"),
        ({"lora_dropout": 0.1}, "adapter.lora_dropout"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_by_name(values: dict, key: str) -> None:
    """Each bad value has one violation with its key."""
    with pytest.raises(PolicyError) as caught:
        AdapterSpec.from_dict({"rank": 8, "alpha": 16, **values})
    assert [v.key for v in caught.value.violations] == [key]


@pytest.mark.parametrize("target", ["lm_head", "k_prog", "proj", "model.layers.99.mlp.up_proj"])
def test_a_target_that_is_no_projection_is_refused(target: str) -> None:
    """lm_head has no adapter, and part of a name is no name; the remedy lists those that there are."""
    with pytest.raises(PolicyError) as caught:
        load_policy("bf16").resolve(QWEN3_8B, AdapterSpec(8, 8, ("q_proj", target)))
    [violation] = caught.value.violations
    assert (violation.key, violation.value) == ("adapter.targets", target)
    assert "down_proj" in violation.remedy


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("name", ["unified-fp8", "bf16", "mixed-bf16-fp8", "unified-fp8-ue8m0"])
def test_only_adapters_are_trained_in_the_graph(name: str, family: str) -> None:
    """The rollout's graph is a subgraph as without adapters; no base module has a wgrad or a master weight."""
    policy, config = load_policy(name), small(family)
    train = training_graph(policy, config, adapter=EVERYWHERE)
    assert (compare(policy, config, EVERYWHERE) == []) is (name != "mixed-bf16-fp8")
    assert networkx.is_directed_acyclic_graph(train)
    trained = {n for n, op in train.nodes(data="op") if op == "wgrad"}
    assert trained
    assert all(".lora_" in n for n in trained)
    assert all(".lora_" in n for n, op in train.nodes(data="op") if op == "master_weight")
    assert all(".lora_" in key for _, target, key in train.edges(keys=True) if target == "optimizer")
    adapters = policy.resolve(config, EVERYWHERE)
    assert len(trained) == sum(row.kind == "adapter" for row in adapters)
