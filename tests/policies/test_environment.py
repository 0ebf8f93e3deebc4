"""The table of environment variables."""

from __future__ import annotations

import pytest

from precision_policies import PolicyError, available, load_policy
from precision_policies.environment import TABLE, effective, expected

ENGINES = ("torch", "vllm")
DEVICES = ("cpu", "cuda")


def test_scale_format_decides_whether_vllm_requantises() -> None:
    """VLLM_USE_DEEP_GEMM_E8M0 is 0 for fp32 scales and 1 for ue8m0; DeepGEMM is on only with an fp8 rollout."""
    unified = load_policy("unified-fp8").environment("vllm", "cuda")
    assert (unified["VLLM_USE_DEEP_GEMM_E8M0"], unified["VLLM_USE_DEEP_GEMM"]) == ("0", "1")
    assert load_policy("unified-fp8-ue8m0").environment("vllm", "cuda")["VLLM_USE_DEEP_GEMM_E8M0"] == "1"
    assert load_policy("bf16").environment("vllm", "cuda")["VLLM_USE_DEEP_GEMM"] == "0"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(available()))
def test_environment_is_a_part_of_the_expected_values(name: str, engine: str, device: str) -> None:
    """Every engine and device has its variables, as texts, with the value that the contract expects."""
    policy = load_policy(name)
    environment = policy.environment(engine, device)
    assert environment
    assert environment.items() <= expected(policy).items()
    assert all(isinstance(value, str) for value in environment.values())
    assert any(variable.startswith("VLLM_") for variable in environment) is (engine == "vllm")


def test_the_torch_variables_hold_for_vllm_too() -> None:
    """vLLM runs on torch: its table contains the learner's for the same device."""
    policy = load_policy("unified-fp8")
    for device in DEVICES:
        assert policy.environment("torch", device).items() <= policy.environment("vllm", device).items()


def test_each_variable_is_listed_once_with_a_reason() -> None:
    """No variable has two rows, and each says why it changes numbers."""
    assert len({v.name for v in TABLE}) == len(TABLE)
    assert all(len(v.why) > 20 for v in TABLE)


def test_unknown_engines_and_devices_are_refused_together() -> None:
    """Both mistakes come in one message with suggestions."""
    with pytest.raises(PolicyError, match=r"did you mean 'vllm'\?\)[\s\S]*did you mean 'cuda'"):
        load_policy("bf16").environment("vlm", "cudaa")


def test_effective_leaves_what_is_set() -> None:
    """Only an unset variable with a sure meaning is replaced."""
    assert effective("ONEDNN_DEFAULT_FPMATH_MODE", "<unset>") == "STRICT"
    assert effective("ONEDNN_DEFAULT_FPMATH_MODE", "BF16") == "BF16"
    assert effective("VLLM_USE_DEEP_GEMM_E8M0", "<unset>") == "<unset>"
    assert effective("PATH", "<unset>") == "<unset>"
