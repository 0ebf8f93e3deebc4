"""GRPO's relatives as configs: each sets what its paper changes and nothing else (formulas: rllib_llm/losses)."""

from __future__ import annotations

from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["DAPOConfig", "DrGRPOConfig", "GSPOConfig", "RLOOConfig", "ReinforcePPConfig"]


class DrGRPOConfig(GRPOConfig):
    """arXiv 2503.20783: no division by response length or by the group's standard deviation."""

    def __init__(self, algo_class: type | None = None):
        super().__init__(algo_class)
        self.training(loss="dr_grpo")


class DAPOConfig(GRPOConfig):
    """arXiv 2503.14476: clip-higher, token-level loss, dynamic sampling.

    Soft overlong punishment needs a length: `.training(overlong_buffer=...)`.
    """

    def __init__(self, algo_class: type | None = None):
        super().__init__(algo_class)
        self.training(loss="dapo", dynamic_sampling=True)


class GSPOConfig(GRPOConfig):
    """arXiv 2507.18071: the importance ratio and its clip belong to the sequence."""

    def __init__(self, algo_class: type | None = None):
        super().__init__(algo_class)
        self.training(loss="gspo")


class RLOOConfig(GRPOConfig):
    """arXiv 2402.14740: REINFORCE with the mean of the group's other rewards as baseline."""

    def __init__(self, algo_class: type | None = None):
        super().__init__(algo_class)
        self.training(loss="rloo")


class ReinforcePPConfig(GRPOConfig):
    """arXiv 2501.03262: REINFORCE++, advantages normalised over the batch instead of the group."""

    def __init__(self, algo_class: type | None = None):
        super().__init__(algo_class)
        self.training(loss="reinforce++")
