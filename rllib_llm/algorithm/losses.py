"""From the settings to a loss, the advantages that belong to it, and the correction that is in force."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rllib_llm.advantages import ADVANTAGE_KINDS
from rllib_llm.corrections import KINDS, Correction, active_correction, correction_violations
from rllib_llm.losses import LOSSES, Loss, make_loss

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import Settings
    from rllib_llm.algorithm.settings import GRPOSettings, RolloutSettings

__all__ = [
    "FALLBACK_CORRECTION",
    "advantage_kind",
    "build_loss",
    "correction_of",
    "guarded_correction",
    "loss_violations",
]

FALLBACK_CORRECTION = Correction("tis_token", upper=2.0)
"""What the guard's action "correct" switches on when neither policy nor config names a correction."""


def _loss(grpo: GRPOSettings, rollout: RolloutSettings) -> Loss:
    config: dict[str, Any] = {
        "clip_low": grpo.clip_low,
        "clip_high": grpo.clip_high,
        "kl_coeff": grpo.kl_coeff if grpo.kl_in == "loss" else 0.0,
        "kl_estimator": grpo.kl_estimator,
        "entropy_coeff": grpo.entropy_coeff,
        "max_tokens": rollout.max_new_tokens * rollout.max_turns,
    }
    return make_loss(grpo.loss, **(config | grpo.loss_config))


def build_loss(settings: Settings) -> Loss:
    """The loss that the settings name. Raises ValueError as `loss_violations` would list."""
    return _loss(settings.grpo, settings.rollout)


def advantage_kind(grpo: GRPOSettings) -> str:
    """The configured kind of advantages, or the one of the loss's paper."""
    return grpo.advantages or LOSSES[grpo.loss].advantage_kind


def kl_is_reward(grpo: GRPOSettings) -> bool:
    """Whether learners put a KL into the advantages; for "reinforce++" they then also normalise them."""
    return grpo.kl_coeff != 0.0 and grpo.kl_in == "reward"


def _correction(settings: Settings) -> Correction | Any:
    override = settings.grpo.correction
    return Correction(**override) if override is not None else settings.policy.correction


def correction_of(settings: Settings) -> Correction | Any | None:
    """The correction in force before the guard has fired; None for none, and for one with `when: guard`."""
    return active_correction(_correction(settings), guard_fired=False)


def guarded_correction(settings: Settings) -> Correction | Any:
    """What the guard's action "correct" switches on: the configured correction, else FALLBACK_CORRECTION."""
    return active_correction(_correction(settings), guard_fired=True) or FALLBACK_CORRECTION


def loss_violations(grpo: GRPOSettings, rollout: RolloutSettings) -> list[str]:
    """What is wrong with loss, advantages and correction, one sentence each."""
    violations = []
    shadowed = sorted(grpo.loss_config.keys() & {f.name for f in fields(grpo)})
    if (
        shadowed
    ):  # the loss would see the value, but nobody would build the reference or the entropy's gradient
        violations.append(
            f"grpo.loss_config sets {', '.join(shadowed)}: settings of training() itself, set them there."
        )
    try:
        _loss(grpo, rollout)
    except ValueError as error:
        violations.append(f"grpo.loss = {grpo.loss!r}: {error}")
    if kl_is_reward(grpo) and not 0.0 < grpo.kl_coeff < math.inf:
        violations.append(f"grpo.kl_coeff = {grpo.kl_coeff} must be a finite number >= 0.")
    if not math.isfinite(grpo.entropy_coeff):
        violations.append(f"grpo.entropy_coeff = {grpo.entropy_coeff} must be a finite number.")
    if grpo.advantages is not None and grpo.advantages not in ADVANTAGE_KINDS:
        violations.append(
            f"grpo.advantages = {grpo.advantages!r} must be one of {', '.join(ADVANTAGE_KINDS)}."
        )
    elif grpo.loss in LOSSES and advantage_kind(grpo) != "reinforce++" and rollout.group_size < 2:
        violations.append(
            f"rollout_config.group_size = {rollout.group_size}: advantages of kind {advantage_kind(grpo)!r} compare "
            "the answers to one prompt and need at least 2; or set grpo.advantages = 'reinforce++'."
        )
    if grpo.correction is not None:
        wrong = set(grpo.correction) - {"kind", "lower", "upper", "veto"}
        kind = grpo.correction.get("kind")
        if wrong or kind not in KINDS:
            violations.append(
                f"grpo.correction = {grpo.correction!r} must have a kind out of {', '.join(KINDS)}, and "
                "optionally lower, upper and veto."
            )
        else:
            violations += [
                f"grpo.{problem}." for problem in correction_violations(Correction(**grpo.correction))
            ]
    return violations + _sampling_violations(grpo, rollout)


def _sampling_violations(grpo: GRPOSettings, rollout: RolloutSettings) -> list[str]:
    if not grpo.dynamic_sampling:
        return []
    violations = []
    if rollout.group_size < 2:
        violations.append(
            "grpo.dynamic_sampling keeps groups whose rewards differ, and with rollout_config.group_size = "
            f"{rollout.group_size} there are none: use groups of at least 2, or no dynamic sampling."
        )
    if grpo.max_sample_rounds < 2:
        violations.append(
            f"grpo.max_sample_rounds = {grpo.max_sample_rounds} leaves dynamic_sampling no round to sample again in; "
            "set it to 2 or more, or dynamic_sampling=False."
        )
    return violations
