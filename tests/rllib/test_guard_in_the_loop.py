"""The policy's guard inside training: it warns, corrects or halts on a real fault, and says which side changed."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from precision_policies import load_policy
from rllib_llm import GRPO
from rllib_llm import metric_names as names
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.algorithm.monitor import PrecisionHalt
from rllib_llm.models import build_model
from rllib_llm.models.checkpoint import load_pretrained
from rllib_llm.rollout.env_runner import Reply
from rllib_llm.sync.export import export_weights

Make = Callable[..., Any]


def policy(action: str, patience: int = 1) -> dict[str, Any]:
    values = load_policy("unified-fp8").to_dict()
    values["guard"] |= {"metric": "max_abs", "tolerance": 1e-3, "action": action, "patience": patience}
    if action == "correct":
        values["correction"] |= {"kind": "tis_token", "upper": 2.0, "when": "guard"}
    return values


def disturb(algo: Any) -> None:
    """A stale layer: the engine's final norm is changed after its receipt was given."""
    model = algo.env_runner.engine.model
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.forget_operands()


def test_halt_leaves_a_checkpoint_and_names_the_side(build: Make, toy_config: Make) -> None:
    """Beyond tolerance training ends; the error says who holds other bytes, and the checkpoint restores."""
    algo = build(toy_config(policy("halt")))
    algo.train()
    disturb(algo)
    with pytest.raises(PrecisionHalt) as error:
        algo.train()
    text = str(error.value)
    assert "max_abs" in text
    assert "rollout/0" in text
    assert "OTHER BYTES" in text
    assert "model.norm.weight" in text
    path = pathlib.Path(text.rsplit("checkpoint of this moment: ", 1)[1].strip())
    other = GRPO.from_checkpoint(path)
    assert other.train()[names.MISMATCH]["bit_equal_share"] == 1.0
    other.stop()


def test_patience_and_warning(build: Make, toy_config: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A violation is counted and warned about; a push repairs the runner, and the count starts again."""
    algo = build(toy_config(policy("warn", patience=2)))
    disturb(algo)
    with caplog.at_level(logging.WARNING, logger="rllib_llm"):
        assert algo.train()[names.PRECISION][names.GUARD_VIOLATIONS] == 1
    assert "OTHER BYTES" in caplog.text
    assert algo.train()[names.PRECISION][names.GUARD_VIOLATIONS] == 0


def test_correct_switches_a_correction_on_and_keeps_it(
    build: Make, toy_config: Make, tmp_path: pathlib.Path
) -> None:
    """The action "correct" makes the loss importance-weighted from the next iteration on, over a checkpoint too."""
    algo = build(toy_config(policy("correct")))
    disturb(algo)
    assert algo.train()[names.PRECISION][names.CORRECTION_ACTIVE] == 0.0
    result = algo.train()
    assert result[names.PRECISION][names.CORRECTION_ACTIVE] == 1.0
    assert result[names.CORRECTION]["weight_mean"] == pytest.approx(1.0, abs=0.5)
    other = GRPO.from_checkpoint(algo.save_to_path(tmp_path / "c"))
    assert other.train()[names.PRECISION][names.CORRECTION_ACTIVE] == 1.0
    assert other.learner_group._learner.forced_correction is not None
    other.stop()


def requantise(runner: Any) -> Reply:
    """vLLM's default on Hopper: the engine goes on with power-of-two (UE8M0) scales for weights and activations."""
    other, lm = load_policy("unified-fp8-ue8m0"), runner.engine.model
    trained = load_pretrained(runner.settings.model.path, other, side="train")
    replacement = build_model(lm.config, other, "rollout")
    replacement.load_rollout_tensors((n, t.unpack()) for n, t in export_weights(trained, 1).tensors.items())
    runner.engine._model = replacement
    return Reply(runner.worker_index)


@pytest.mark.parametrize("runners", [0, 2])
def test_an_engine_with_ue8m0_scales_halts_training_and_is_named(
    build: Make, toy_config: Make, runners: int
) -> None:
    """The fault enters one runner after its receipt: that side is named as changed, the others as unchanged."""
    algo = build(toy_config("unified-fp8").env_runners(num_env_runners=runners))
    faulty = runners  # the local runner is 0, remote ones are 1, 2
    call_runners(algo.env_runner_group, requantise, [faulty])
    with pytest.raises(PrecisionHalt) as error:
        algo.train()
    text = str(error.value)
    assert f"rollout/{faulty} side: CHANGED: plan_hash" in text
    assert f"rollout/{faulty}: holds OTHER BYTES than were sent" in text
    assert "train side: unchanged" in text
    assert ("rollout/1 side: unchanged" in text) == (runners == 2)
