"""With actors: the same results for any number of runners and learners, and nothing lost when one dies."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from rllib_llm import GRPO
from rllib_llm import metric_names as names
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.algorithm.sampling import dispatch
from rllib_llm.rollout.env_runner import LLMEnvRunner, Reply

Make = Callable[..., Any]


def versions(algo: Any, group: Any = None) -> dict[int, int]:
    """Weights version that each runner's engine holds."""
    replies = call_runners(group or algo.env_runner_group, _version)
    return {runner: reply.value for runner, reply in replies.answers.items()}


def _version(runner: Any) -> Reply:
    return Reply(runner.worker_index, runner.engine.weights_version)


def _held(runner: Any) -> Reply:
    return Reply(runner.worker_index, dict(runner.engine.attest().weights))


def _pid(runner: Any) -> Reply:
    return Reply(runner.worker_index, os.getpid())


def _learner_weights(algo: Any) -> dict[str, np.ndarray]:
    state = algo.learner_group.get_weights()["default_policy"]
    return {k: v.float().numpy() for k, v in state.items()}


def test_result_does_not_depend_on_the_number_of_learners(build: Make, toy_config: Make) -> None:
    """0, 1 and 2 learners, and other micro-batch sizes, make the same update.

    Gradients are sums in another order: Adam divides by sqrt(v), so single weights may differ by a small part of
    one step (lr = 1e-3); 1 % of a step is allowed. A per-rank mean would be off by tens of per cent.
    """
    results, weights = [], []
    for learners, tokens in ((0, 8192), (0, 24), (1, 8192), (2, 24)):
        config = toy_config("bf16", max_new_tokens=6).learners(num_learners=learners)
        algo = build(
            config.training(num_epochs=2, minibatches_per_epoch=2, micro_batch_tokens=tokens, grad_clip=None)
        )
        results.append(algo.train())
        weights.append(_learner_weights(algo))
        if learners == 2:
            _assert_an_idle_learner_takes_part(algo)
            _assert_a_failing_learner_ends_the_update(algo)
        algo.stop()
    first = results[0][names.LEARNERS]["default_policy"]
    for result, other in zip(results[1:], weights[1:], strict=True):
        learner = result[names.LEARNERS]["default_policy"]
        for name in (names.LOSS, names.GRAD_NORM, names.ENTROPY, "ratio"):
            assert learner[name] == pytest.approx(first[name], rel=2e-3, abs=1e-6), name
        assert learner[names.NUM_TOKENS] == first[names.NUM_TOKENS]
        assert learner[names.NUM_OPTIMIZER_STEPS] == 4
        for key, value in weights[0].items():
            np.testing.assert_allclose(other[key], value, atol=4 * 1e-3 * 0.01, err_msg=key)
    # The dict holds numpy floats only, so == compares every metric and bucket.
    assert results[3][names.MISMATCH] == results[0][names.MISMATCH], "mismatch is that of all tokens, exactly"


def _assert_an_idle_learner_takes_part(algo: Any) -> None:
    """A learner without any sequence adds zeros; both end with equal weights and moments."""
    episodes = algo.env_runner.sample(prompt_indices=[50])[:1]
    algo._learn(episodes, np.ones(1, np.float32))
    digests = [r.get() for r in algo.learner_group.foreach_learner(_digest)]
    assert digests[0] == digests[1]
    assert [r.get() for r in algo.learner_group.foreach_learner(_steps)] == [6, 6], (
        "one of two minibatches is empty"
    )


def _assert_a_failing_learner_ends_the_update(algo: Any) -> None:
    """The error of one learner reaches the driver; the other does not wait for its sums for ever."""
    algo.learner_group.foreach_learner(_break, remote_actor_ids=[1])
    with pytest.raises(Exception, match=r"out of memory, say|process group|[Cc]onnection|died"):
        algo.train()


def _break(learner: Any) -> None:
    def broken() -> Any:
        raise RuntimeError("out of memory, say")

    learner.gradients.take = broken


def _digest(learner: Any) -> str:
    return learner.digest()


def _steps(learner: Any) -> int:
    return learner.optimizer_steps


@pytest.fixture(scope="module")
def fleet(ray_session: Any, toy_model: str) -> Any:
    """One algorithm with two training runners and an evaluation runner, shared (building takes 20 s)."""
    from rllib_llm import GRPOConfig
    from tests.rllib.toy import CopyDigit

    config = (
        GRPOConfig()
        .precision("unified-fp8")
        .model(toy_model)
        .environment(CopyDigit)
        .rollout(group_size=4, prompts_per_iteration=4, max_new_tokens=4)
        .env_runners(num_env_runners=2)
        .evaluation(evaluation_num_env_runners=1, evaluation_duration=6)
        .training(lr=1e-3)
        .debugging(seed=0, log_level="ERROR")
    )
    algo = config.build_algo()
    yield algo
    algo.stop()


def test_samples_do_not_depend_on_the_number_of_runners(fleet: Any, build: Make, toy_config: Make) -> None:
    """Two remote runners sample, train and evaluate exactly what one local runner does."""
    local = build(toy_config().evaluation(evaluation_duration=6))
    for algo in (fleet, local):
        assert algo.next_prompt == 0
    for _ in range(2):
        remote_result, local_result = fleet.train(), local.train()
        for group, name in (
            (names.ENV_RUNNERS, names.EPISODE_RETURN_MEAN),
            (names.ENV_RUNNERS, names.NUM_TOKENS_SAMPLED),
        ):
            # A mean over runners of means is rounded in another order.
            assert remote_result[group][name] == pytest.approx(local_result[group][name], rel=1e-12)
        assert (
            remote_result[names.LEARNERS]["default_policy"][names.GRAD_NORM]
            == local_result[names.LEARNERS]["default_policy"][names.GRAD_NORM]
        )
        assert remote_result[names.MISMATCH]["bit_equal_share"] == 1.0
    one, other = fleet.evaluate()[names.ENV_RUNNERS], local.evaluate()[names.ENV_RUNNERS]
    assert one["num_episodes"] == other["num_episodes"] == 6
    assert one[names.EPISODE_RETURN_MEAN] == pytest.approx(other[names.EPISODE_RETURN_MEAN], rel=1e-12)


def exported_by(learner: Any) -> Any:
    return learner.weight_source.exported(learner.weights_version, by_reference=False)


def test_every_runner_holds_the_learners_weights(fleet: Any) -> None:
    """After an iteration and an evaluation all runners hold the bytes that the learner exports."""
    fleet.train()
    fleet.evaluate()
    sent = exported_by(fleet.learner_group._learner)
    for group in (fleet.env_runner_group, fleet.eval_env_runner_group):
        held = call_runners(group, _held).answers
        assert held
        assert all(reply.value == sent.hashes for reply in held.values())
    assert set(versions(fleet).values()) == {sent.version}


def test_restored_weights_are_on_every_runner_before_the_first_sample(
    fleet: Any, tmp_path: pathlib.Path
) -> None:
    """A restore returns only when every runner confirmed the restored weights, however slow loading is."""
    fleet.train()
    path = fleet.save_to_path(tmp_path / "c")
    version = fleet.weights.version
    fleet.train()
    call_runners(fleet.env_runner_group, _slow_down)
    fleet.restore_from_path(path)
    assert set(versions(fleet).values()) == {version}
    assert fleet.train()[names.NUM_SAMPLES_REFUSED] == 0
    other = GRPO.from_checkpoint(path)
    assert set(versions(other).values()) == {version}
    other.stop()


def _slow_down(runner: Any) -> Reply:
    apply = runner.engine.update_weights

    def slow(update: Any) -> Any:
        time.sleep(1.0)
        return apply(update)

    runner.engine.update_weights = slow
    return Reply(runner.worker_index)


def test_runners_that_do_not_answer_in_time_are_reported(fleet: Any, tmp_path: pathlib.Path) -> None:
    """A sample timeout loses its problems openly, with an error per runner (RLlib drops slow samples in silence)."""
    gate = tmp_path / "open"
    call_runners(fleet.env_runner_group, partial(_wait_for, gate=gate))
    found = dispatch(fleet.env_runner_group, range(4), fleet.weights.version, timeout_s=0.1, evaluation=False)
    gate.touch()
    call_runners(fleet.env_runner_group, partial(_wait_for, gate=None))  # queued behind the late samples
    assert found.lost == [0, 1, 2, 3]
    assert not found.episodes
    assert any("no answer within rollout.sample_timeout_s = 0.1 s" in error for error in found.errors)
    assert fleet.train()[names.ENV_RUNNERS]["num_episodes"] >= 16


def _wait_for(runner: Any, gate: pathlib.Path | None) -> Reply:
    runner.factories["train"].config["wait_for"] = gate
    return Reply(runner.worker_index)


def test_a_killed_runner_costs_nothing_but_time(fleet: Any) -> None:
    """Its prompts go to the others in the same iteration; when it is back it holds the current weights."""
    fleet.train()
    victim = call_runners(fleet.env_runner_group, _pid).answers[1].value
    os.kill(victim, signal.SIGKILL)
    result = fleet.train()
    assert result[names.ENV_RUNNERS]["num_episodes"] == 16
    assert result[names.NUM_PROMPTS_LOST] == 0
    while len(versions(fleet)) < 2:
        fleet.train()
        time.sleep(1.0)
    assert versions(fleet) == {1: fleet.weights.version, 2: fleet.weights.version}
    assert fleet.train()[names.MISMATCH]["bit_equal_share"] == 1.0


class BrokenEngineRunner(LLMEnvRunner):
    """Its engine works once and then raises."""

    def make_module(self) -> None:
        super().make_module()
        generate, calls = self.engine.generate, []

        def broken(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("the engine broke")
            return generate(*args, **kwargs)

        self.engine.generate = broken


class UnbuildableRunner(LLMEnvRunner):
    """Fails where a wrong installation on a worker would."""

    def make_module(self) -> None:
        raise ImportError("no such engine here")


def test_an_engine_that_always_fails_ends_the_run_with_its_error(build: Make, toy_config: Make) -> None:
    """The engine's own error reaches the user after max_empty_samples iterations."""
    config = toy_config(max_empty_samples=1).env_runners(num_env_runners=1, env_runner_cls=BrokenEngineRunner)
    algo = build(config)
    algo.train()
    with pytest.raises(Exception, match="the engine broke"):
        algo.train()


def test_a_runner_that_cannot_be_built_shows_its_own_error(toy_config: Make, ray_session: Any) -> None:
    """RLlib would show "IndexError: list index out of range"."""
    config = toy_config().env_runners(num_env_runners=1, env_runner_cls=UnbuildableRunner)
    with pytest.raises(Exception, match="no such engine here"):
        config.build_algo()
