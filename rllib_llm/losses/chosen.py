"""From the settings to a loss, the advantages that belong to it, and the correction that is in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from precision_policies.errors import Violation, closest
from rllib_llm.losses import LOSSES, Loss, make_loss
from rllib_llm.losses.advantages import ADVANTAGE_KINDS
from rllib_llm.losses.corrections import Correction, active_correction, correction_violations

if TYPE_CHECKING:
    from rllib_llm.settings.groups import RolloutSettings, Settings, TrainSettings

__all__ = [
    "FALLBACK_CORRECTION",
    "advantage_kind",
    "build_loss",
    "correction_of",
    "guarded_correction",
    "loss_violations",
    "reward_violations",
    "sampling_violations",
]

FALLBACK_CORRECTION = Correction("tis_token", upper=2.0)
"""What the guard's action "correct" switches on when neither policy nor config names a correction."""


SCALED = {"group": "grpo", "batch": "grpo_batch", "none": "dr_grpo"}
"""TRL's names of what (reward - mean of its group) is divided by, and our kinds of advantages."""


def _loss(train: TrainSettings, rollout: RolloutSettings) -> Loss:
    config: dict[str, Any] = {
        "clip_low": train.clip_low,
        "clip_high": train.clip_high,
        "kl_coeff": train.kl_coeff if train.kl_in == "loss" else 0.0,
        "kl_estimator": train.kl_estimator,
        "entropy_coeff": train.entropy_coeff,
        "max_tokens": rollout.max_new_tokens * rollout.max_turns,
    }
    return make_loss(train.loss, **(config | train.loss_config))


def build_loss(settings: Settings) -> Loss:
    """The loss that the settings name. Raises ValueError as `loss_violations` would list."""
    return _loss(settings.train, settings.rollout)


def advantage_kind(train: TrainSettings) -> str:
    """The configured kind of advantages, or the one of the loss's paper."""
    if train.scale_rewards is not None:
        return SCALED[train.scale_rewards]
    return train.advantages or LOSSES[train.loss].advantage_kind


def kl_is_reward(train: TrainSettings) -> bool:
    """Whether learners put a KL into the advantages; for "reinforce++" they then also normalise them."""
    return train.kl_coeff != 0.0 and train.kl_in == "reward"


def _correction(settings: Settings) -> Correction | Any:
    override = settings.train.correction
    return override if override is not None else settings.policy.correction


def correction_of(settings: Settings) -> Correction | Any | None:
    """The correction in force before the guard has fired; None for none, and for one with `when: guard`."""
    return active_correction(_correction(settings), guard_fired=False)


def guarded_correction(settings: Settings) -> Correction | Any:
    """What the guard's action "correct" switches on: the configured correction, else FALLBACK_CORRECTION."""
    return active_correction(_correction(settings), guard_fired=True) or FALLBACK_CORRECTION


def loss_violations(train: TrainSettings, rollout: RolloutSettings) -> Iterator[Violation]:
    """What is wrong with the loss and its settings."""
    for name in sorted(train.loss_config.keys() & {f.name for f in fields(train)}):
        # the loss would see the value, but nobody would build the reference or the entropy's gradient
        problem, remedy = f"is a setting of section train, not of {train.loss!r}", f"set train.{name}"
        yield Violation(f"train.loss_config.{name}", train.loss_config[name], problem, remedy)
    if train.loss not in LOSSES:
        remedy = f"use one of {', '.join(LOSSES)}"
        yield Violation("train.loss", train.loss, f"no such loss{closest(train.loss, LOSSES)}", remedy)
        return
    try:
        _loss(train, rollout)
    except ValueError as error:
        yield Violation("train.loss", train.loss, str(error))


def reward_violations(train: TrainSettings, rollout: RolloutSettings) -> Iterator[Violation]:
    """What is wrong with advantages and correction."""
    if train.advantages is not None and train.advantages not in ADVANTAGE_KINDS:
        problem = f"no such kind{closest(train.advantages, ADVANTAGE_KINDS)}"
        remedy = f"use one of {', '.join(ADVANTAGE_KINDS)}"
        yield Violation("train.advantages", train.advantages, problem, remedy)
    elif train.advantages is not None and train.scale_rewards is not None:
        problem = f"chooses the advantages, and so does train.advantages = {train.advantages!r}"
        yield Violation("train.scale_rewards", train.scale_rewards, problem, "set one of them")
    elif train.loss in LOSSES and advantage_kind(train) != "reinforce++" and rollout.group_size < 2:
        problem = f"advantages of kind {advantage_kind(train)!r} compare the answers to one prompt"
        remedy = "use at least 2, or train.advantages = 'reinforce++'"
        yield Violation("rollout.group_size", rollout.group_size, problem, remedy)
    if train.correction is not None:
        for v in correction_violations(train.correction):
            yield Violation(f"train.{v.key}", v.value, v.problem, v.remedy)


def sampling_violations(train: TrainSettings, rollout: RolloutSettings) -> Iterator[Violation]:
    """What leaves dynamic sampling nothing to do."""
    if not train.dynamic_sampling:
        return
    if rollout.group_size < 2:
        problem = (
            f"keeps groups whose rewards differ, of which rollout.group_size = {rollout.group_size} has none"
        )
        yield Violation(
            "train.dynamic_sampling", True, problem, "use groups of at least 2, or set it to false"
        )
    if train.max_sample_rounds < 2:
        problem = "leaves train.dynamic_sampling no round to sample again in"
        yield Violation(
            "train.max_sample_rounds", train.max_sample_rounds, problem, "use 2, or no dynamic sampling"
        )
