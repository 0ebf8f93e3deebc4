"""Policy losses, one file each. `make_loss("grpo", clip_low=0.2)` builds one by name."""

from __future__ import annotations

from typing import Any

from rllib_llm.losses.base import Loss, LossConfig, LossInputs, LossOutput
from rllib_llm.losses.calibration import RatioNoise, calibrated, noise_sums
from rllib_llm.losses.dapo import DAPOLoss, GroupSelection, informative_groups, overlong_penalty
from rllib_llm.losses.dr_grpo import DrGRPOLoss
from rllib_llm.losses.grpo import GRPOLoss
from rllib_llm.losses.gspo import GSPOLoss
from rllib_llm.losses.reinforce_pp import ReinforcePPLoss
from rllib_llm.losses.rloo import RLOOLoss

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (GRPOLoss, DrGRPOLoss, DAPOLoss, GSPOLoss, RLOOLoss, ReinforcePPLoss)
}


def make_loss(name: str, **config: Any) -> Loss:
    """The loss called `name` with these `LossConfig` fields; unknown names, keys and values are refused."""
    wrong = [] if name in LOSSES else [f"training.loss = {name!r}: one of {', '.join(sorted(LOSSES))}"]
    known = LossConfig.__dataclass_fields__
    wrong += [
        f"{key} = {config[key]!r}: no such setting; known: {', '.join(known)}"
        for key in config
        if key not in known
    ]
    if wrong:
        raise ValueError("make_loss:\n  " + "\n  ".join(wrong))
    return LOSSES[name](LossConfig(**config))


__all__ = [
    "LOSSES",
    "DAPOLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GroupSelection",
    "Loss",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "RLOOLoss",
    "RatioNoise",
    "ReinforcePPLoss",
    "calibrated",
    "informative_groups",
    "make_loss",
    "noise_sums",
    "overlong_penalty",
]
