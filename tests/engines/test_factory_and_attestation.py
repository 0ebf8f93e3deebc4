import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precision_kernels import UnboundOperatorError, bindings, dispatch
from precision_policies import Attestation, PrecisionMismatchError, compare_attestations, load_policy
from rllib_llm.engines import EngineUnavailableError, factory, make_engine
from rllib_llm.engines.base import RolloutEngine
from rllib_llm.process.attest import build_attestation, prepare_process
from rllib_llm.sync.export import export_weights
from tests.models.cases import CONFIGS, make_model

ROOT = Path(__file__).parents[2]


def test_unknown_engine_names_the_closest():
    """A misspelt engine is refused with the closest name and all names."""
    with pytest.raises(ValueError, match="did you mean 'torch'") as caught:
        make_engine("troch", CONFIGS["qwen3"](), "bf16")
    assert "torch, vllm" in str(caught.value)


def test_missing_engine_is_a_named_error_with_the_installation(monkeypatch):
    """An engine whose package is not installed raises with how to install it; nothing else runs in its place."""
    monkeypatch.setitem(factory.ENGINES, "vllm", ("rllib_llm.engines.torch_engine", "TorchEngine"))
    monkeypatch.setitem(factory._REQUIRES, "vllm", "a_package_that_is_not_installed")
    with pytest.raises(EngineUnavailableError, match="pip install") as caught:
        make_engine("vllm", CONFIGS["qwen3"](), "bf16")
    assert "a_package_that_is_not_installed" in str(caught.value)
    monkeypatch.setitem(factory.ENGINES, "vllm", ("rllib_llm.engines.no_such_module", "X"))
    monkeypatch.setitem(factory._REQUIRES, "vllm", "torch")
    with pytest.raises(EngineUnavailableError, match="no_such_module"):
        make_engine("vllm", CONFIGS["qwen3"](), "bf16")


def test_a_new_engine_is_one_entry_in_the_table(monkeypatch):
    """Registering a class under a name is enough to make it."""
    monkeypatch.setitem(factory.ENGINES, "again", ("rllib_llm.engines.torch_engine", "TorchEngine"))
    assert isinstance(make_engine("again", CONFIGS["qwen3"](), "bf16"), RolloutEngine)


@pytest.mark.parametrize("policy", ["unified-fp8", "bf16", "mixed-bf16-fp8"])
def test_learner_and_engine_attest_the_same_contract(policy):
    """The statements of both sides compare equal, survive JSON, and name operators, versions and weights."""
    model = make_model("qwen3", policy)
    engine = make_engine("torch", model.config, policy)
    update = export_weights(model, 1)
    engine.update_weights(update)
    prepare_process(model.policy, "torch", "cpu")
    train = build_attestation("train", model.policy, model.plan, torch.device("cpu"))
    rollout = engine.attest()
    compare_attestations(model.policy, train, rollout)
    assert Attestation.from_dict(json.loads(json.dumps(rollout.to_dict()))) == rollout
    assert dict(rollout.weights) == dict(update.hashes)
    assert rollout.side == "rollout"
    assert rollout.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"attention", "rms_norm", "token_logprobs"} <= rollout.operators.keys()
    assert rollout.informational["weights_version"] == "1"


def test_differences_between_the_sides_are_found():
    """Another model config, policy or operator on one side breaks the contract, and each is named."""
    model = make_model("qwen3", "unified-fp8")
    train = build_attestation("train", model.policy, model.plan, torch.device("cpu"))
    other = make_engine("torch", CONFIGS["llama"](), "bf16").attest()
    with pytest.raises(PrecisionMismatchError) as caught:
        compare_attestations(model.policy, train, other)
    keys = [v.key for v in caught.value.violations]
    assert any("plan_hash" in key for key in keys)
    assert "rollout.policy_fingerprint" in keys
    swapped = dict(train.operators) | {"rms_norm": "vllm.rms_norm@0.32#0"}
    faked = build_attestation("rollout", model.policy, model.plan, torch.device("cpu"), operators=swapped)
    with pytest.raises(PrecisionMismatchError, match="rms_norm"):
        compare_attestations(model.policy, train, faked)


def test_environment_is_read_back_not_assumed(monkeypatch):
    """A variable that this process has otherwise than the policy wants is attested as it is, and breaks the contract;
    preparing a process never overwrites it."""
    policy = load_policy("bf16")
    model = make_model("qwen3", policy)
    (name, wanted), *_ = policy.environment(engine="torch", device="cpu").items()
    monkeypatch.setenv(name, "something else")
    prepare_process(policy, "torch", "cpu")
    assert os.environ[name] == "something else"
    ours = build_attestation("train", policy, model.plan, torch.device("cpu"))
    assert ours.environment[name] == "something else"
    with pytest.raises(PrecisionMismatchError, match=name):
        compare_attestations(policy, ours, ours)
    monkeypatch.delenv(name)
    assert name not in build_attestation("train", policy, model.plan, torch.device("cpu")).environment
    prepare_process(policy, "torch", "cpu")
    assert os.environ[name] == wanted


@pytest.mark.parametrize(("policy", "fp8"), [("unified-fp8", True), ("bf16", False), ("fp16", False)])
def test_a_side_whose_libraries_are_missing_does_not_attest(monkeypatch, policy, fp8):
    """Without the libraries of CUDA, a process that would compute there raises an error that names the operators its
    policy needs and what to install; without fp8 in the policy, no operator on codes is asked for."""
    missing = {
        name: library._replace(module=f"no_such_{name}") for name, library in bindings.LIBRARIES.items()
    }
    monkeypatch.setattr(dispatch, "LIBRARIES", missing)
    monkeypatch.setattr(dispatch, "_bound", {})
    model = make_model("qwen3", policy)
    with pytest.raises(UnboundOperatorError, match="install deep_gemm or vllm") as caught:
        build_attestation("train", model.policy, model.plan, torch.device("cuda"))
    assert "attention" in str(caught.value)
    assert ("block_fp8_matmul" in str(caught.value)) == fp8


_TF32 = """
import json, sys, torch
from precision_policies import load_policy
from rllib_llm.process import attest
started = json.loads(sys.argv[1])
for line in started["before"]:
    exec(line)
torch.cuda.is_initialized = lambda: started["cuda"]
torch.cuda.get_device_capability = lambda: tuple(started["capability"])
policy = load_policy("unified-fp8")
attest.prepare_process(policy, "torch", "cuda")
print(json.dumps(attest.environment_readback(policy, "torch", "cuda")))
"""


@pytest.mark.parametrize(
    "before",
    [
        [],
        ["torch.backends.cuda.matmul.allow_tf32 = True"],
        ["torch.set_float32_matmul_precision('medium')", "torch.backends.cudnn.allow_tf32 = True"],
        ["torch.backends.fp32_precision = 'tf32'"],
        ["torch.backends.cudnn.conv.fp32_precision = 'tf32'"],
        ["torch.backends.cudnn.rnn.fp32_precision = 'tf32'"],
    ],
)
def test_a_process_in_which_cuda_has_started_is_brought_into_the_contract(before):
    """TF32 is off in torch whatever was chosen before; variables that were read already are not claimed."""

    def readback(cuda, capability=(9, 0)):
        given = json.dumps({"before": before, "cuda": cuda, "capability": capability})
        unset = {
            k: v for k, v in os.environ.items() if k not in load_policy("bf16").environment("torch", "cuda")
        }
        command = [sys.executable, "-c", _TF32, given]
        done = subprocess.run(command, env=unset, capture_output=True, text=True, check=True, cwd=ROOT)
        return json.loads(done.stdout.splitlines()[-1])

    late = {"TRITON_F32_DEFAULT": "ieee", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    off = {
        "torch.backends.cuda.matmul.fp32_precision": "ieee",
        "torch.backends.cudnn.fp32_precision": "ieee",
    }
    assert readback(True) == late | off
    if not before:
        assert readback(True, (10, 0)) == {"TRITON_F32_DEFAULT": "ieee"} | off
        assert readback(False) == load_policy("unified-fp8").environment("torch", "cuda")


@pytest.mark.gpu
def test_fp32_products_are_exact_after_the_process_was_prepared():
    """In a process that computed with TF32 before, an fp32 product on the GPU has fp32's error once it is prepared."""
    torch.set_float32_matmul_precision("high")
    x = torch.randn(512, 512, device="cuda")
    exact = x.double() @ x.double()
    coarse = (x @ x - exact).abs().max().item()
    prepare_process(load_policy("bf16"), "torch", "cuda")
    fine = (x @ x - exact).abs().max().item()
    assert fine < 2e-4
    assert coarse > 10 * fine or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
