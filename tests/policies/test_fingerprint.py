"""Fingerprints: equal for equal numbers everywhere, different for every difference that counts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from precision_policies import (
    PolicyError,
    PrecisionOverrideWarning,
    available,
    from_yaml,
    load_policy,
    schema,
)
from precision_policies.adapters import formats_of
from precision_policies.coerce import hints, optional_part
from precision_policies.policy import PrecisionPolicy
from tests.policies.models import MOE_100_LAYERS, QWEN3_8B

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from precision_policies import available, load_policy
config = json.loads(sys.stdin.read())
print(json.dumps({n: [load_policy(n).fingerprint, load_policy(n).resolve(config).hash] for n in available()}))
"""


def reported(python: str, environment: dict[str, str], folder: str | Path = ROOT) -> dict[str, list[str]]:
    """Fingerprints and plan hashes of all shipped policies as another process computes them."""
    result = subprocess.run(
        [python, "-c", PROGRAM],
        input=json.dumps(QWEN3_8B),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=1200,
        env={**os.environ, **environment},
        check=True,
    )
    return json.loads(result.stdout)


def own() -> dict[str, list[str]]:
    """The same, computed here."""
    return {n: [load_policy(n).fingerprint, load_policy(n).resolve(QWEN3_8B).hash] for n in available()}


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_fingerprints_and_plan_hashes_are_equal_in_other_processes(seed: str) -> None:
    """Neither hash randomisation, nor locale, nor working directory enters a fingerprint."""
    environment = {"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONUTF8": "0"}
    assert reported(sys.executable, environment) == own()


@cache
def other_python() -> str | None:
    """An interpreter of the other supported version that can import omegaconf, if there is one."""
    wanted = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    named = os.environ.get("RLLIB_LLM_OTHER_PYTHON")
    for python in [named] if named else [shutil.which(f"python{wanted}")]:
        if python and subprocess.run([python, "-c", "import omegaconf"], capture_output=True).returncode == 0:
            return python
    return None


def test_fingerprints_are_equal_on_the_other_supported_python() -> None:
    """Python 3.11 and 3.12 agree on every fingerprint and plan hash."""
    python = other_python()
    if python is None:
        pytest.skip("no second Python with omegaconf here; name one in RLLIB_LLM_OTHER_PYTHON")
    with tempfile.TemporaryDirectory() as folder:  # a package of the same layout, without installing it
        package = Path(folder) / "precision_policies"
        shutil.copytree(ROOT / "precision_policies", package)
        shutil.copytree(ROOT / "policies", package / "shipped")
        assert reported(python, {"PYTHONPATH": folder}, folder) == own()


def test_the_spelling_of_yaml_does_not_matter() -> None:
    """Flow or block style, quotes, key order, comments, number and boolean spelling give one fingerprint."""
    one = """
schema_version: 1
extends: unified-fp8
guard: {tolerance: 0.001, patience: 10, action: warn}
correction: {accept_uncorrected: false}
clip_calibration: {enabled: true, strength: 2}
exempt: {modules: ["**.o_proj", '**.down_proj']}
"""
    other = """
"clip_calibration":   # something
    strength: 2.0
    'enabled': True
exempt:
  modules:
    - '**.down_proj'
    - "**.o_proj"
    - '**.o_proj'
guard:
  action: "warn"
  patience: 0xA
  tolerance: 1e-3
name: otherwise-called
description: |
  told in
  other words
extends: 'unified-fp8'
schema_version: 0x1
"""
    assert from_yaml(one).fingerprint == from_yaml(other).fingerprint


def test_zero_has_no_sign_and_mappings_have_no_order() -> None:
    """-0.0 is 0.0, and the order in which overrides are given changes neither fingerprint nor YAML text."""
    minus = load_policy({"extends": "unified-fp8", "guard": {"tolerance": -0.0}})
    assert minus.fingerprint == load_policy("unified-fp8").fingerprint
    free = {"extends": "unified-fp8", "correction": {"accept_uncorrected": True}, "guard": {"action": "warn"}}
    with pytest.warns(PrecisionOverrideWarning):
        one = load_policy({**free, "operator_overrides": {"rotary": "a", "linear": "b"}})
    with pytest.warns(PrecisionOverrideWarning):
        other = load_policy({**free, "operator_overrides": {"linear": "b", "rotary": "a"}})
    assert one == other
    assert one.to_yaml() == other.to_yaml()
    assert one.fingerprint == other.fingerprint


def leaves(cls: type, prefix: str = "") -> list[str]:
    """Dotted keys of every value in the schema."""
    found: list[str] = []
    for name, hint in hints(cls).items():
        inner = optional_part(hint) or hint
        nested = hasattr(inner, "__dataclass_fields__")
        found += leaves(inner, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return found


CHANGES = {
    "operators": "scheme",
    "master_dtype": "split_float32",
    "optimizer_state_dtype": "blockwise_8bit",
    "quantisation.scale_format": "ue8m0",
    "quantisation.scale_floor": 2.0**-90,
    "linear.rollout_forward": "bf16",
    "linear.dgrad": "bf16",
    "linear.wgrad": "bf16",
    "linear.saved": "bf16",
    "lm_head.train_forward": "fp32",
    "lm_head.rollout_forward": "fp32",
    "lm_head.dgrad": "fp32",
    "lm_head.wgrad": "fp32",
    "lm_head.saved": "fp32",
    "activation.saved": "fp8",
    "router.train_forward": "bf16",
    "router.rollout_forward": "bf16",
    "exempt.modules": ["**.o_proj"],
    "exempt.first_layers": 1,
    "exempt.last_layers": 1,
    "ragged": "exempt",
    "logprobs.temperature": "refuse",
    "logprobs.truncation": "refuse",
    "correction.kind": "mis_token",
    "correction.lower": 0.5,
    "correction.upper": 3.0,
    "correction.veto": 0.01,
    "clip_calibration.enabled": True,
    "clip_calibration.strength": 2.0,
    "guard.metric": "k3",
    "guard.tolerance": 0.3,
    "guard.action": "halt",
    "guard.patience": 4,
    "loss_scaling.initial": 2.0,
    "loss_scaling.growth_interval": 7,
    "adapters.weight": "fp32",
    "adapters.inner": "fp32",
    "adapters.dgrad": "fp32",
    "adapters.wgrad": "fp32",
    "adapters.saved": "fp32",
}
# Not in CHANGES: keys with one value, keys bound to compute_dtype (test below), and what is no number.
ONE_VALUE = {
    "quantisation.code_format",
    "quantisation.rounding",
    "quantisation.activation_block",
    "quantisation.column_block",
    "quantisation.weight_block",
    "quantisation.weight_source",
    "linear.accumulation",
    "lm_head.accumulation",
    "norm.statistics",
    "attention.softmax",
    "attention.accumulation",
    "activation.internal",
    "router.accumulation",
    "logprobs.dtype",
    "embedding.wgrad",
    "adapters.accumulation",
    "adapters.addition",
    "adapters.gradient",
}
WITH_COMPUTE_DTYPE = {
    "compute_dtype",
    "gradient_dtype",
    "linear.train_forward",
    "embedding.train_forward",
    "embedding.rollout_forward",
    "norm.train_forward",
    "norm.rollout_forward",
    "norm.residual",
    "norm.saved",
    "attention.train_forward",
    "attention.rollout_forward",
    "attention.backward",
    "attention.saved",
    "activation.train_forward",
    "activation.rollout_forward",
    "kv_cache.format",
}
NO_NUMBER = {
    "schema_version",
    "name",
    "description",
    "operator_overrides",
    "correction.accept_uncorrected",
    "correction.when",
}


def test_every_key_is_accounted_for() -> None:
    """A new key of the schema must say here whether it enters the fingerprint."""
    assert set(leaves(PrecisionPolicy)) == CHANGES.keys() | ONE_VALUE | WITH_COMPUTE_DTYPE | NO_NUMBER


@pytest.mark.parametrize("key", CHANGES)
def test_every_number_enters_the_fingerprint(key: str) -> None:
    """Changing this one key changes the fingerprint, and the diff names it."""
    base = {
        "extends": "unified-fp8",
        "operators": "shared",
        "correction": {"kind": "mis_token", "upper": 2.0},
        "guard": {"tolerance": 0.5, "action": "warn"},
        "loss_scaling": {"initial": 4.0, "growth_interval": 9},
        "adapters": dataclasses.asdict(formats_of("bfloat16")),
    }
    if key == "correction.kind":
        base["correction"] = {"kind": "tis_token", "upper": 2.0}
    changed: dict = json.loads(json.dumps(base))
    section, _, leaf = key.partition(".")
    if leaf:
        changed[section] = {**changed.get(section, {}), leaf: CHANGES[key]}
    else:
        changed[section] = CHANGES[key]
    before, after = load_policy(base), load_policy(changed)
    assert before.fingerprint != after.fingerprint
    named = {d.key for d in before.diff(after)}
    assert key in named or section in named


def test_what_is_no_number_does_not_enter() -> None:
    """Name, description and the acknowledgement of an uncorrected run leave the fingerprint alone."""
    base = load_policy("unified-fp8").fingerprint
    assert load_policy({"extends": "unified-fp8", "name": "x", "description": "y"}).fingerprint == base
    assert (
        load_policy({"extends": "unified-fp8", "correction": {"accept_uncorrected": True}}).fingerprint
        == base
    )


def test_fingerprints_of_the_shipped_policies_have_not_moved() -> None:
    """Checkpoints and registries hold these; a change here needs a new schema version or a CHANGELOG entry."""
    stored = json.loads((Path(__file__).parent / "fingerprints.json").read_text())
    assert {name: load_policy(name).fingerprint for name in available()} == stored["policies"]
    assert load_policy("unified-fp8").resolve(QWEN3_8B).hash == stored["plans"]["unified-fp8 on QWEN3_8B"]
    assert (
        load_policy("unified-fp8").resolve(MOE_100_LAYERS).hash
        == stored["plans"]["unified-fp8 on MOE_100_LAYERS"]
    )


def test_all_shipped_fingerprints_differ() -> None:
    """No two shipped policies compute the same."""
    assert len({load_policy(name).fingerprint for name in available()}) == len(available())
    with pytest.raises(PolicyError):
        load_policy("unified")


def test_every_format_of_the_optimizers_state_has_its_fingerprint() -> None:
    """Masters and moments in other formats are other policies, all different; in FP32 they are the shipped ones."""
    states = itertools.product(get_args(schema.MasterDtype), get_args(schema.MomentDtype))
    made = {
        (master, moments): load_policy(
            {"extends": "unified-fp8", "master_dtype": master, "optimizer_state_dtype": moments}
        ).fingerprint
        for master, moments in states
    }
    assert len(set(made.values())) == 12
    assert made["float32", "float32"] == load_policy("unified-fp8").fingerprint
