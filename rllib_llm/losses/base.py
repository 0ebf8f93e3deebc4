"""What every policy loss takes, returns and is normalised by.

A loss is a pure function of per-token tensors of one packed micro-batch. It returns a **sum**, never a mean:
the learner adds the sums of all micro-batches of all ranks and divides once by the global count
(`Loss.count`), so that 0, 1 or 2 learners and any micro-batching give the same update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rllib_llm.losses import terms


@dataclass(frozen=True)
class LossInputs:
    """One packed micro-batch. T tokens of S whole sequences; a sequence is never split over micro-batches.

    logp: fp32 [T], log-probability of each token under the trained policy; requires grad.
    old_logp: fp32 [T], finite on trained tokens, what the ratio is taken against (the trainer's own forward
        before the first update of this batch, or the rollout's value); no grad.
    rollout_logp: fp32 [T], what the engine reported when it sampled the token. The losses do not read it
        (`corrections.correction_weights` and `mismatch` do); it is here so that one object holds the batch.
    advantages: fp32 [T], the sequence's advantage repeated on its tokens, or a value per token.
    mask: bool or 0/1 [T], true on tokens that are trained (responses); prompts, tool output and padding are
        false. Values at masked tokens are never read, so they may be NaN.
    sequence_ids: int64 [T], 0..S-1. num_sequences: S, including sequences without a trained token.
    ref_logp: fp32 [T] under the frozen reference policy, needed when kl_coeff > 0.
    entropy: fp32 [T] in nats of the trained policy at that position; needs grad when entropy_coeff > 0.
    correction_weights: fp32 [T], multiplies each token's policy term (not its KL or entropy term).
    """

    logp: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    num_sequences: int
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None
    correction_weights: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logp.shape
        wrong = [
            f"{name} {tuple(value.shape)}"
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.shape != shape
        ]
        if len(shape) != 1 or wrong:
            raise ValueError(
                f"LossInputs wants packed tensors of one shape [T]; logp is {tuple(shape)}"
                + (f", but {', '.join(wrong)}" if wrong else "")
                + ". Concatenate the sequences of the micro-batch and give sequence_ids."
            )


@dataclass(frozen=True)
class LossConfig:
    """Settings shared by all losses; None means the value of the loss's own paper (see each file).

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    dual_clip: upper bound c > 1 on the ratio of negative-advantage tokens (Ye et al. 2019); None: off.
    kl_coeff: weight of the KL to the reference inside the loss, in nats per token for every loss; needs ref_logp.
    kl_estimator: "k1" | "k2" | "k3", see `terms.kl_estimate`.
    entropy_coeff: weight of the entropy bonus, in nats per token for every loss; needs entropy.
    max_tokens: longest response in tokens; the constant of Dr.GRPO's normaliser.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coeff: float = 0.0
    kl_estimator: str = "k3"
    entropy_coeff: float = 0.0
    max_tokens: int | None = None


@dataclass(frozen=True)
class LossOutput:
    """loss_sum: fp32 scalar with grad, to be divided by the global count. metrics: name -> (sum, count), both
    detached scalars; add the pairs over micro-batches and ranks, then divide."""

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


class Loss:
    """Base of the policy losses: validates the config, adds KL and entropy, sums, and counts.

    A subclass states its paper's formula and defines `policy_terms`; class attributes say the rest.
    """

    name: ClassVar[str]
    normaliser: ClassVar[str]  # what `count` counts: "tokens", "sequences" or "constant"
    per_sequence_mean: ClassVar[bool] = False  # divide each token by its sequence's trained length first
    advantage_kind: ClassVar[str]  # the kind for advantages.group_advantages that belongs to the paper
    ratio_level: ClassVar[str] = "token"  # "token" | "sequence_mean" | "sequence_sum": what one ratio spans
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.2)

    def __init__(self, config: LossConfig = LossConfig()) -> None:
        low, high = self.default_clip
        self.config = replace(
            config,
            clip_low=low if config.clip_low is None else config.clip_low,
            clip_high=high if config.clip_high is None else config.clip_high,
        )
        self.clip_low = float(self.config.clip_low or 0.0)
        self.clip_high = float(self.config.clip_high or 0.0)
        self._validate()

    def with_clip(self, clip_low: float, clip_high: float) -> Loss:
        """The same loss with another clip range (used by the calibration)."""
        return type(self)(replace(self.config, clip_low=clip_low, clip_high=clip_high))

    def policy_terms(self, batch: LossInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per token [T]: the policy loss, the ratio, and whether the lower / the upper clip cut the
        gradient."""
        raise NotImplementedError

    def count(self, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
        """This micro-batch's part of the global normaliser, fp32 scalar.

        "tokens": trained tokens. "sequences": sequences with at least one trained token. "constant": the same
        times max_tokens. Sequences without a trained token (padding, filtered samples) count nowhere.
        """
        mask = mask.bool()
        if self.normaliser == "tokens":
            return mask.sum().float()
        lengths = terms.sequence_lengths(mask, sequence_ids, num_sequences)
        sequences = (lengths > 0).sum().float()
        return sequences if self.normaliser == "sequences" else sequences * float(self.config.max_tokens or 0)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Sum of the policy, KL and entropy terms over the trained tokens of one micro-batch."""
        self._require(inputs)
        batch = terms.without_masked_values(inputs)
        policy, ratio, cut_low, cut_high = self.policy_terms(batch)
        if batch.correction_weights is not None:
            policy = policy * batch.correction_weights
        regulariser, extra = torch.zeros_like(policy), {}
        if batch.ref_logp is not None:
            kl = terms.kl_estimate(batch.logp, batch.ref_logp, self.config.kl_estimator)
            extra["kl_reference"] = kl
            if self.config.kl_coeff:
                regulariser = regulariser + self.config.kl_coeff * kl
        if batch.entropy is not None:
            extra["entropy"] = batch.entropy
            if self.config.entropy_coeff:
                regulariser = regulariser - self.config.entropy_coeff * batch.entropy
        scale = self._token_scale(batch)
        with torch.no_grad():
            # KL(old || new), since the old policy sampled the tokens
            drift = terms.kl_estimate(batch.old_logp, batch.logp, "k3")
            per_token = {"ratio": ratio, "approx_kl": drift, "clip_fraction": cut_low | cut_high}
            per_token |= {"clip_fraction_low": cut_low, "clip_fraction_high": cut_high, **extra}
            metrics = self._means(per_token, batch)
            count = self.count(batch.mask, batch.sequence_ids, batch.num_sequences)
            metrics["policy_loss"] = ((policy * scale).sum().detach(), count)
        return LossOutput((policy * scale).sum() + (regulariser * self._nats_scale(batch)).sum(), metrics)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`terms.clipped_surrogate` with this loss's bounds."""
        return terms.clipped_surrogate(
            ratio, advantages, self.clip_low, self.clip_high, self.config.dual_clip
        )

    def _token_scale(self, batch: LossInputs) -> Tensor:
        scale = batch.mask.float()
        if self.per_sequence_mean:
            lengths = terms.sequence_lengths(batch.mask, batch.sequence_ids, batch.num_sequences)
            scale = scale / lengths.clamp(min=1)[batch.sequence_ids]
        return scale

    def _nats_scale(self, batch: LossInputs) -> Tensor:
        """[T]: what makes KL and entropy, divided by the global count, nats per token whatever the loss counts.

        Mean over all trained tokens where the loss counts tokens, else the mean over sequences of their tokens' mean.
        """
        scale = batch.mask.float()
        if self.normaliser == "tokens":
            return scale
        lengths = terms.sequence_lengths(batch.mask, batch.sequence_ids, batch.num_sequences)
        units = 1.0 if self.normaliser == "sequences" else float(self.config.max_tokens or 0)
        return scale * units / lengths.clamp(min=1)[batch.sequence_ids]

    @staticmethod
    def _means(values: dict[str, Tensor], batch: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
        tokens = batch.mask.sum().float()
        return {k: (v.detach().float().mul(batch.mask).sum(), tokens) for k, v in values.items()}

    def _require(self, inputs: LossInputs) -> None:
        needs = {"ref_logp": "kl_coeff", "entropy": "entropy_coeff"}
        for field, key in needs.items():
            if getattr(self.config, key) and getattr(inputs, field) is None:
                raise ValueError(
                    f"{self.name}: {key} = {getattr(self.config, key)} needs LossInputs.{field}. "
                    f"Compute it in the learner or set training.{key} = 0."
                )

    def _validate(self) -> None:
        c, wrong = self.config, []
        if not 0.0 <= self.clip_low <= 1.0:
            wrong.append(
                f"clip_low = {c.clip_low}: the lower end of the ratio is 1 - clip_low, so 0 <= clip_low <= 1"
            )
        if not self.clip_high >= 0.0:
            wrong.append(f"clip_high = {c.clip_high}: must be >= 0")
        if c.dual_clip is not None and not c.dual_clip > 1.0:
            wrong.append(f"dual_clip = {c.dual_clip}: bounds a ratio above 1, so it must be > 1 (usual: 3)")
        if not c.kl_coeff >= 0.0:
            wrong.append(f"kl_coeff = {c.kl_coeff}: a negative value would reward leaving the reference")
        if c.kl_estimator not in terms.KL_ESTIMATORS:
            wrong.append(f"kl_estimator = {c.kl_estimator!r}: one of {', '.join(terms.KL_ESTIMATORS)}")
        if self.normaliser == "constant" and not (c.max_tokens and c.max_tokens > 0):
            wrong.append(
                f"max_tokens = {c.max_tokens}: {self.name} divides by it; give rollout.max_new_tokens"
            )
        if wrong:
            raise ValueError(f"loss {self.name!r} cannot be built:\n  " + "\n  ".join(wrong))
