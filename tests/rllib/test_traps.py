"""RLlib 2.60's silent corruptions: each has a guard, and a test that fails without it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

from precision_policies import PrecisionMismatchError, load_policy
from rllib_llm import GRPO
from rllib_llm import metric_names as names
from rllib_llm.algorithm.weight_sync import WeightPushError
from rllib_llm.learner.learner import LLMTorchLearner
from rllib_llm.on_disk.checkpoint import CheckpointError, PrecisionChangeError
from rllib_llm.rollout.env_runner import LLMEnvRunner

Make = Callable[..., Any]


def learner_of(algo: Any) -> LLMTorchLearner:
    return algo.learner_group._learner


def held_by_engine(algo: Any) -> dict[str, str]:
    return dict(algo.env_runner.engine.attest().weights)


def exported(algo: Any) -> Any:
    learner = learner_of(algo)
    return learner.weight_source.exported(learner.weights_version, by_reference=False)


# ---------------------------------------------------------------- 1 and 2: weights on the runners


def test_rolled_back_weights_reach_the_runner(build: Make, tmp_path: pathlib.Path) -> None:
    """After an in-place restore the engine holds the restored weights and version (RLlib keeps the newer ones)."""
    algo = build()
    algo.train()
    path = algo.save_to_path(tmp_path / "c")
    saved = exported(algo).hashes
    algo.train()
    assert held_by_engine(algo) != saved
    algo.restore_from_path(path)
    assert held_by_engine(algo) == saved == exported(algo).hashes
    assert algo.env_runner.engine.weights_version == algo.weights.version
    assert algo.train()[names.NUM_SAMPLES_REFUSED] == 0


def test_state_with_a_lower_sequence_number_is_taken(build: Make) -> None:
    """`algo.set_state` of an earlier state (Tune's PBT) brings the earlier weights to learner and runner."""
    algo = build()
    algo.train()  # RLlib takes sequence number 0 for "force"
    state, saved = algo.get_state(), exported(algo).hashes
    algo.train()
    algo.set_state(state)
    assert exported(algo).hashes == held_by_engine(algo) == saved


def test_restored_run_continues_as_if_never_interrupted(build: Make, tmp_path: pathlib.Path) -> None:
    """Checkpoint, restore in place, and from_checkpoint all give the next iteration of the uninterrupted run."""
    algo = build()
    algo.train()
    path = algo.save_to_path(tmp_path / "c")
    expected = algo.train()
    algo.restore_from_path(path)
    again = algo.train()
    other = GRPO.from_checkpoint(os.path.relpath(path))
    third = other.train()
    other.stop()
    for result in (again, third):
        for group, name in (
            (names.ENV_RUNNERS, names.EPISODE_RETURN_MEAN),
            (names.ENV_RUNNERS, names.NUM_TOKENS_SAMPLED),
        ):
            assert result[group][name] == expected[group][name]
        learner = result[names.LEARNERS]["default_policy"]
        assert learner[names.GRAD_NORM] == expected[names.LEARNERS]["default_policy"][names.GRAD_NORM]
        assert result["training_iteration"] == expected["training_iteration"]


def test_a_push_that_changes_bytes_is_an_error(build: Make) -> None:
    """A runner whose receipt does not match what was sent stops training with its name and the tensors."""
    algo = build()
    engine = algo.env_runner.engine
    apply = engine.update_weights

    def corrupt(update: Any) -> Any:
        receipt = apply(update)
        first = sorted(receipt.hashes)[0]
        return type(receipt)(
            receipt.version, receipt.policy_fingerprint, receipt.plan_hash, {**receipt.hashes, first: "0"}
        )

    engine.update_weights = corrupt
    with pytest.raises(WeightPushError, match="1 tensors differ"):
        algo.train()


def test_a_push_under_a_stale_version_is_an_error(build: Make) -> None:
    """A receipt of another version is not taken for a confirmation."""
    algo = build()
    engine = algo.env_runner.engine
    old = engine.update_weights(exported(algo).update)
    engine.update_weights = lambda update: old
    with pytest.raises(WeightPushError, match="holds version"):
        algo.train()


def test_a_receipt_that_hides_other_bytes_is_an_error(build: Make) -> None:
    """What a runner attests that it holds is compared with what was sent, whatever its receipt said."""
    algo = build()
    engine = algo.env_runner.engine
    apply, norm = engine.update_weights, engine.model.get_buffer("model.norm.weight")

    def change_afterwards(update: Any) -> Any:
        receipt = apply(update)
        norm.mul_(2.0)
        return receipt

    engine.update_weights = change_afterwards
    with pytest.raises(PrecisionMismatchError, match=r"weights\.model\.norm\.weight"):
        algo.train()


def test_weights_never_travel_by_rllibs_sync(build: Make) -> None:
    """RLlib's own sync carries no weights, and a runner refuses them in a state message."""
    algo = build()
    state = algo.learner_group.get_state("learner/rl_module", inference_only=True)["learner"]
    assert state["rl_module"] == {"default_policy": {}}
    algo.env_runner.set_state(state)
    with pytest.raises(ValueError, match="apply_weights"):
        algo.env_runner.set_state(algo.learner_group.get_state("learner/rl_module")["learner"])


def test_another_policy_on_a_runner_is_refused(build: Make, toy_config: Make) -> None:
    """A runner that computes under another policy than the learner cannot take part."""

    class OtherPolicyRunner(LLMEnvRunner):
        def make_module(self) -> None:
            import dataclasses

            self.settings = dataclasses.replace(self.settings, policy=load_policy("bf16"))
            super().make_module()

    with pytest.raises(Exception, match="fingerprint"):
        build(toy_config().env_runners(env_runner_cls=OtherPolicyRunner))


def test_another_operator_on_a_runner_is_refused_after_the_next_push(build: Make) -> None:
    """The attestations of both sides are compared after every push, not only at the start."""
    algo = build()
    engine = algo.env_runner.engine
    attest = engine.attest

    def other() -> Any:
        statement = attest()
        return dataclasses.replace(statement, operators={**statement.operators, "rms_norm": "other@1#0"})

    engine.attest = other
    with pytest.raises(PrecisionMismatchError, match="rms_norm"):
        algo.train()


# ---------------------------------------------------------------- 3: complete checkpoints


def test_a_learner_that_fails_to_save_fails_the_checkpoint(
    build: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint without the learner's files is an error that names them, not a success."""
    algo = build()
    monkeypatch.setattr(LLMTorchLearner, "save_to_path", lambda *args, **kwargs: None)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        algo.save_to_path(tmp_path / "c")


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "learner/state.json",
        "optimizer.safetensors",
        "algorithm_state.json",
        "rllib_checkpoint.json",
    ],
)
def test_truncated_checkpoints_are_refused(build: Make, tmp_path: pathlib.Path, file: str) -> None:
    """A file that is empty, cut off at any place, or of other content is found before anything is restored."""
    algo = build()
    algo.train()  # before a step the optimiser has no tensors
    path = pathlib.Path(algo.save_to_path(tmp_path / "c"))
    [found] = [p for p in path.rglob("*") if str(p).endswith(file)]
    whole = found.read_bytes()
    for left in (b"", whole[:5], whole[: len(whole) // 2], whole[:-1], b"not what was written\n"):
        found.write_bytes(left)
        with pytest.raises(CheckpointError, match=file.split("/")[-1]):
            algo.restore_from_path(path)
    found.write_bytes(whole)
    algo.restore_from_path(path)


def test_a_learner_that_died_is_named_when_saving(
    build: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead learner is said to be dead, not to hold other weights than the living."""

    class Died:
        ok = False

        def get(self) -> Exception:
            return ray.exceptions.ActorDiedError()

    algo = build()
    alive = algo.learner_group.foreach_learner
    monkeypatch.setattr(
        algo.learner_group, "foreach_learner", lambda call, **kwargs: [*alive(call, **kwargs), Died()]
    )
    with pytest.raises(CheckpointError, match=r"learners died: learner 1: ActorDiedError"):
        algo.save_to_path(tmp_path / "c")


def test_a_restore_that_did_not_arrive_is_an_error(
    build: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore the learner's weights and moments are compared with what was saved."""
    algo = build()
    algo.train()
    path = algo.save_to_path(tmp_path / "c")
    algo.train()
    monkeypatch.setattr(LLMTorchLearner, "restore_from_path", lambda *args, **kwargs: None)
    with pytest.raises(CheckpointError, match="not those saved"):
        algo.restore_from_path(path)


def test_relative_paths_work(build: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLlib refuses relative paths with "URI has empty scheme"."""
    monkeypatch.chdir(tmp_path)
    algo = build()
    assert algo.save_to_path("here/c") == str(tmp_path / "here/c")
    algo.restore_from_path("here/c")


# ---------------------------------------------------------------- 4: exact state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_moments_survive_bit_by_bit(
    build: Make, toy_config: Make, tmp_path: pathlib.Path, dtype: str
) -> None:
    """Master weights and Adam moments come back exactly, in fp32 and bf16 (RLlib: TypeError, or rounding)."""
    policy = load_policy("bf16").to_dict()
    policy["master_dtype"] = policy["optimizer_state_dtype"] = dtype
    algo = build(toy_config(policy))
    algo.train()
    learner = learner_of(algo)
    weights = {k: v.clone() for k, v in learner.lm_module.lm.state_dict().items()}
    moments = learner.optimizer.exact_state()
    assert {v.dtype for v in weights.values()} == {getattr(torch, dtype)}
    assert moments["state"][0]["exp_avg"].dtype == getattr(torch, dtype)
    path = algo.save_to_path(tmp_path / "c")
    algo.train()
    algo.restore_from_path(path)
    for name, value in learner.lm_module.lm.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for now, then in zip(learner.optimizer.exact_state()["state"], moments["state"], strict=True):
        assert now["step"] == then["step"]
        assert torch.equal(now["exp_avg"], then["exp_avg"])
        assert torch.equal(now["exp_avg_sq"], then["exp_avg_sq"])


# ---------------------------------------------------------------- 5: non-finite gradients


def test_a_non_finite_gradient_skips_the_step_and_is_counted(
    build: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One NaN leaves weights, moments and step count untouched (RLlib applies it, or steps with zeros)."""
    algo = build()
    algo.train()
    learner = learner_of(algo)
    before = learner.digest()
    take = learner.gradients.take

    def poisoned() -> Any:
        grads = take()
        next(iter(grads.values())).view(-1)[0] = float("nan")
        return grads

    monkeypatch.setattr(learner.gradients, "take", poisoned)
    metrics = algo.train()[names.LEARNERS]["default_policy"]
    assert learner.digest() == before
    assert metrics[names.NUM_SKIPPED_STEPS] == metrics[names.NUM_SKIPPED_STEPS_LIFETIME] == 1
    assert metrics[names.NUM_OPTIMIZER_STEPS] == 1
    monkeypatch.undo()
    assert algo.train()[names.LEARNERS]["default_policy"][names.NUM_OPTIMIZER_STEPS] == 2
    assert learner.digest() != before


# ---------------------------------------------------------------- the policy in the checkpoint


def test_another_policy_is_refused_unless_allowed(
    build: Make, toy_config: Make, tmp_path: pathlib.Path
) -> None:
    """A checkpoint names its policy; restoring under another lists the differences, and needs an explicit yes."""
    path = build().save_to_path(tmp_path / "c")
    with pytest.raises(PrecisionChangeError, match="allow_precision_change") as error:
        build(toy_config("bf16")).restore_from_path(path)
    assert "'unified-fp8'" in str(error.value)
    allowed = build(toy_config("bf16").precision("bf16", allow_precision_change=True))
    allowed.restore_from_path(path)
    assert allowed.train()[names.LEARNERS]["default_policy"][names.GRAD_NORM] >= 0.0


def test_an_allowed_change_of_the_master_dtype_rounds_weights_and_moments(
    build: Make, toy_config: Make, tmp_path: pathlib.Path
) -> None:
    """With the explicit yes, fp32 masters and moments continue as bf16 ones; without it nothing is ever rounded."""
    algo = build(toy_config("bf16"))
    algo.train()
    weights = {k: v.clone() for k, v in learner_of(algo).lm_module.lm.state_dict().items()}
    path = algo.save_to_path(tmp_path / "c")
    policy = load_policy("bf16").to_dict()
    policy["master_dtype"] = policy["optimizer_state_dtype"] = "bfloat16"
    other = build(toy_config(policy).precision(policy, allow_precision_change=True))
    other.restore_from_path(path)
    for name, value in learner_of(other).lm_module.lm.state_dict().items():
        assert torch.equal(value, weights[name].bfloat16()), name
    assert learner_of(other).optimizer.exact_state()["state"][0]["exp_avg"].dtype == torch.bfloat16
    assert other.train()["training_iteration"] == 2


def test_a_policy_that_changed_under_its_name_is_noticed(
    build: Make, toy_config: Make, tmp_path: pathlib.Path
) -> None:
    """The fingerprint counts, not the name."""
    path = build().save_to_path(tmp_path / "c")
    changed = load_policy("unified-fp8").to_dict()
    changed["guard"]["tolerance"] = 0.125
    with pytest.raises(PrecisionChangeError):
        build(toy_config(changed)).restore_from_path(path)


def test_directories_of_others_are_refused(build: Make, tmp_path: pathlib.Path) -> None:
    """A directory that is no checkpoint of ours is named as such."""
    with pytest.raises(CheckpointError):
        build().restore_from_path(tmp_path)
