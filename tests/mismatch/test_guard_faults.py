"""Real faults, injected below the contract, in a real learner model and a real engine: the guard sees each
one.

The contract (attestations, receipts, plan and byte checks) refuses most of these faults earlier; here they
are put behind its back, to show that the numbers alone give them away and that the evidence names the side.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from precision_policies import load_policy
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.mismatch import first_difference, metrics, probe
from rllib_llm.mismatch.guard import Evidence, Guard
from rllib_llm.models import CausalLM, PackedBatch, build_model
from rllib_llm.sync.export import export_weights
from tests.models.cases import CONFIGS, make_model, random_sequences

KIND = "qwen3"
POLICY = load_policy("unified-fp8")


class Flow:
    """A learner's model, an engine that received its weights, and one iteration of sampling and scoring."""

    def __init__(self) -> None:
        self.train: CausalLM = make_model(KIND, POLICY)
        self.engine = make_engine("torch", CONFIGS[KIND](), POLICY)
        self.sent = export_weights(self.train, 1)
        self.held = dict(self.engine.update_weights(self.sent).hashes)

    def iteration(self) -> tuple[dict[str, float], PackedBatch]:
        """Mismatch metrics of 16 sampled responses of up to 40 tokens, and the scored batch."""
        prompts = random_sequences((5, 9, 3, 12), self.train.architecture.vocab)
        answers = self.engine.generate(prompts, SamplingParams(n=4, max_tokens=40, seed=7))
        pairs = [(p, c) for p, group in zip(prompts, answers, strict=True) for c in group]
        batch = PackedBatch.from_sequences([[*p, *c.token_ids.tolist()] for p, c in pairs])
        with torch.no_grad():
            scored = self.train.token_logprobs(self.train(batch), torch.roll(batch.input_ids, -1))
        mask = torch.zeros(len(batch.input_ids), dtype=torch.bool)
        rollout, ids = torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.int64)
        for i, ((prompt, completion), end) in enumerate(
            zip(pairs, batch.cu_seqlens[1:].tolist(), strict=True)
        ):
            n = len(completion.token_ids)
            rows = slice(end - n - 1, end - 1)  # the row before a token predicts it
            mask[rows], ids[end - n - len(prompt) : end] = True, i
            rollout[rows] = torch.from_numpy(completion.logprobs)
        return metrics(scored, rollout, mask, ids), batch

    def evidence(self) -> Evidence:
        attestation = self.engine.attest()
        return Evidence(
            attestations={"rollout/1": attestation},
            sent=self.sent.hashes,
            held={"rollout/1": attestation.weights},
        )


@pytest.fixture
def flow() -> Iterator[Flow]:
    flow = Flow()
    yield flow
    flow.engine.close()


@pytest.fixture
def guard(flow: Flow) -> Guard:
    guard = Guard(POLICY.guard)
    guard.remember(flow.evidence())
    return guard


def test_the_healthy_flow_is_bit_equal_and_the_guard_is_silent(flow: Flow, guard: Guard) -> None:
    """unified-fp8 on CPU, decode against packed training forward: max |Delta| is 0 and the policy's guard
    agrees."""
    seen, _ = flow.iteration()
    assert seen["num_tokens"] > 200
    assert (seen["max_abs"], seen["bit_equal_share"], seen["k3"]) == (0.0, 1.0, 0.0)
    verdict = guard.check(seen, flow.evidence())
    assert (verdict.action, verdict.message) == ("none", "")


def test_an_engine_with_ue8m0_scales_halts_the_run(flow: Flow, guard: Guard) -> None:
    """vLLM's default on Hopper: the engine requantises weights and activations with power-of-two scales.
    The metrics show it, the policy's guard halts, and the message says that the rollout side changed, not
    the trainer."""
    other = load_policy("unified-fp8-ue8m0")
    requantised = build_model(CONFIGS[KIND](), other, "train")
    requantised.load_state_dict(flow.train.state_dict())
    replacement = build_model(CONFIGS[KIND](), other, "rollout")
    replacement.load_rollout_tensors(
        (n, t.unpack()) for n, t in export_weights(requantised, 1).tensors.items()
    )
    flow.engine._model = replacement
    seen, _ = flow.iteration()
    assert seen["bit_equal_share"] < 0.5
    assert seen["k3"] > 1e-6
    verdict = guard.check(seen, flow.evidence())
    assert verdict.action == "halt"
    assert "rollout/1 side: CHANGED: plan_hash" in verdict.message
    assert "rollout/1: holds OTHER BYTES than were sent for model.layers.0." in verdict.message


def test_a_stale_layer_halts_the_run_and_is_named(flow: Flow, guard: Guard) -> None:
    """After an optimiser step the engine gets all new weights but keeps one layer's old ones: the guard
    halts, the receipt names the tensor, the attestation says the side is otherwise unchanged, the probe
    finds the layer."""
    name = "model.layers.1.mlp.up_proj"
    stale = {k: t for k, t in flow.sent.tensors.items() if k.startswith(f"{name}.")}
    assert len(stale) == 2  # codes and scales
    with torch.no_grad():
        for parameter in flow.train.parameters():
            parameter.mul_(1.05)
    flow.train.forget_operands()
    flow.sent = export_weights(flow.train, 2)
    flow.engine.update_weights(flow.sent)
    assert flow.iteration()[0]["max_abs"] == 0.0
    mixture = flow.sent.tensors | stale
    flow.engine.model.load_rollout_tensors((k, t.unpack()) for k, t in mixture.items())
    seen, batch = flow.iteration()
    verdict = guard.check(seen, flow.evidence())
    assert verdict.action == "halt"
    assert "rollout/1 side: unchanged since the first check" in verdict.message
    assert f"rollout/1: holds OTHER BYTES than were sent for {name}.weight" in verdict.message
    layers = probe(flow.train, flow.engine.model, lambda m: m(batch))
    assert first_difference(layers) == "model.layers.1.mlp"  # its projections are computed jointly


def test_the_same_faults_pass_a_guard_that_tolerates_them(flow: Flow) -> None:
    """The verdict depends on the policy's tolerance: mixed-bf16-fp8's (k3 0.1) accepts what unified-fp8's
    does not."""
    with torch.no_grad():
        flow.train.model.norm.weight.mul_(1.01)  # newer than what the engine holds
    flow.train.forget_operands()
    seen, _ = flow.iteration()
    assert Guard(load_policy("mixed-bf16-fp8").guard).check(seen).action == "none"
    assert Guard(POLICY.guard).check(seen).action == "halt"
