"""Faults inside of a learner's update: memory that runs out, gradients that are not finite, samples all rejected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from precision_policies import load_policy
from rllib_llm import metric_names as names
from rllib_llm.errors import LearnerMemoryError

Make = Callable[..., Any]


def learner_of(algo: Any) -> Any:
    return algo.learner_group._learner


def weights_of(algo: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner_of(algo).lm_module.lm.state_dict().items()}


def limit_memory(algo: Any, tokens: int) -> None:
    """Backward passes of more tokens than this run out of memory, after gradients of the first were accumulated."""
    learner = learner_of(algo)
    forward = learner.module.forward_train

    def limited(batch: Any) -> Any:
        out = forward(batch)
        [train_input] = batch.values()
        if int(train_input.micro_batch.packed.cu_seqlens[-1]) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return out

    learner.module.forward_train = limited


@pytest.mark.ray
def test_memory_that_runs_out_halves_the_micro_batch(build: Make, toy_config: Make, caplog: Any) -> None:
    """The update is the one of smaller micro-batches, to the bit; nothing is counted twice; the numbers are told."""
    tight, small = build(toy_config()), build(toy_config())
    limit_memory(tight, 40)
    with caplog.at_level(logging.WARNING):
        first = tight.train()[names.LEARNERS]["default_policy"]
    limit = learner_of(tight).micro_batch_tokens
    assert 20 <= limit <= 40
    assert f"train.micro_batch_tokens = {limit}" in caplog.text
    learner_of(small).micro_batch_tokens = limit
    second = small.train()[names.LEARNERS]["default_policy"]
    for name in (names.NUM_MICRO_BATCHES, names.LOSS, names.GRAD_NORM, names.NUM_TOKENS):
        assert first[name] == second[name], name
    for name, value in weights_of(small).items():
        assert torch.equal(weights_of(tight)[name], value), name


@pytest.mark.ray
def test_a_sequence_that_does_not_fit_is_an_error_with_its_length(build: Make, toy_config: Make) -> None:
    """One sequence cannot be cut: a named error, with what to set."""
    algo = build(toy_config())
    limit_memory(algo, 1)
    with pytest.raises(
        LearnerMemoryError, match=r"one sequence \(\d+ tokens\).*2\.00 GiB.*gradient_checkpointing"
    ):
        algo.train()


@pytest.mark.ray
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_skipped_and_named(
    build: Make, toy_config: Make, caplog: Any, value: float
) -> None:
    """No weight changes, the step is counted, the parameter is named, and the next iteration trains."""
    algo = build(toy_config())
    learner, before = learner_of(algo), weights_of(algo)
    name, param = next(iter(learner.lm_module.named_parameters()))

    def spoil(reached: torch.nn.Parameter) -> None:
        reached.grad.view(-1)[0] = value

    handle = param.register_post_accumulate_grad_hook(spoil)
    with caplog.at_level(logging.WARNING):
        metrics = algo.train()[names.LEARNERS]["default_policy"]
    handle.remove()
    assert metrics[names.NUM_SKIPPED_STEPS] == metrics[names.NUM_SKIPPED_STEPS_LIFETIME] == 1
    assert f"first in {name}" in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in weights_of(algo).items())
    assert algo.train()[names.LEARNERS]["default_policy"][names.NUM_OPTIMIZER_STEPS] == 1


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["mis_token", "icepop"])
def test_samples_that_are_all_rejected_make_no_step(
    build: Make, toy_config: Make, caplog: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Weight decay and momentum alone move no weight either."""
    policy = load_policy("mixed-bf16-fp8").to_dict()
    policy["correction"] |= {"kind": kind, "lower": 0.5, "upper": 2.0}
    algo = build(toy_config(policy).training(weight_decay=0.1, lr=1e-2))
    monkeypatch.setattr(
        "rllib_llm.learner.learner.correction_weights",
        lambda correction, logp, *rest: (torch.zeros_like(logp), {}),
    )
    before = weights_of(algo)
    with caplog.at_level(logging.WARNING):
        metrics = algo.train()[names.LEARNERS]["default_policy"]
    assert metrics[names.NUM_OPTIMIZER_STEPS] == 0
    assert metrics[names.NUM_SKIPPED_STEPS] == 1
    assert "rejected every sample" in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in weights_of(algo).items())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *[("training", "lr", value) for value in (1e38, 2.0, ((0, 1e-6), (100, 50.0)))],
        ("training", "weight_decay", 1e38),
        *[("rollout", "temperature", value) for value in (1e-45, 1e-30, 0.009)],
        ("rollout", "eval_temperature", 1e-45),
        *[("rollout", "stop", value) for value in (("",), ("a", ""))],
    ],
)
def test_numbers_that_cannot_train_are_refused_before_the_start(
    toy_config: Make, section: str, key: str, value: Any
) -> None:
    """The error names the setting."""
    from rllib_llm.errors import SettingsError

    config = toy_config()
    getattr(config, section)(**{key: value})
    with pytest.raises(SettingsError) as caught:
        config.validate()
    name = f"{'train' if section == 'training' else section}.{key}"
    assert name in [violation.key for violation in caught.value.violations]
