"""AdamW with the formats that a precision policy names, learning-rate schedules, and fp16 loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from precision_kernels import (
    MOMENT_FORMATS,
    AdamWStep,
    LowHalf,
    Moment,
    adamw,
    empty_moment,
    load_moment,
    random_keys,
    random_words,
    store_moment,
)

__all__ = ["LossScaler", "PolicyAdamW", "lr_factor"]

_MOMENTS = (("exp_avg", False), ("exp_avg_sq", True))
LowHalves = Mapping[torch.nn.Parameter, Callable[[], LowHalf | None]]


class PolicyAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are stored in `state_dtype` and whose arithmetic is fp32.

    torch.optim.AdamW keeps moments in the parameter's dtype and, for bf16 parameters, also computes in it:
    `1 - beta2 = 0.001` is then below half a bf16 ulp of the second moment, which stops growing. The formula and the
    formats are defined in `precision_kernels.reference.adamw`.

    Args:
        params: parameters of any floating dtype, contiguous; gradients may have another (fp32 accumulators).
        state_dtype: format of exp_avg and exp_avg_sq: float32, bfloat16, bfloat16_stochastic or blockwise_8bit.
        low_halves: of parameters that are high halves of fp32 masters, what gives the rest; asked at every update, for
            moving a module to a device replaces its buffers.

    Raises:
        ValueError: unknown state_dtype.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype | str = torch.float32,
        low_halves: LowHalves | None = None,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        name = str(state_dtype).removeprefix("torch.")
        if name not in MOMENT_FORMATS:
            raise ValueError(f"PolicyAdamW: state_dtype must be one of {MOMENT_FORMATS}, got {state_dtype!r}")
        self.moments = next(format for format in MOMENT_FORMATS if format == name)
        self._low_halves = low_halves or {}

    @torch.no_grad()
    def update(
        self,
        gradients: dict[torch.nn.Parameter, torch.Tensor],
        scale: float = 1.0,
        used: Callable[[torch.nn.Parameter], None] = lambda _: None,
    ) -> None:
        """One update with the given gradients; parameters without one stay as they are.

        Args:
            gradients: fp32, of the parameters' shapes. Taken out of the dict as they are used, so that their memory
                can be given back before the last is.
            scale: what the gradients are multiplied by first, rounded to fp32.
            used: called with each parameter whose gradient is no longer needed.
        """
        position = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param in gradients:
                    self._update_one(param, gradients.pop(param), group, position, scale)
                    used(param)
                position += 1

    def _update_one(
        self,
        param: torch.nn.Parameter,
        grad: torch.Tensor,
        group: dict[str, Any],
        position: int,
        scale: float,
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            for name, square in _MOMENTS:
                state |= _entries(name, empty_moment(param.shape, self.moments, square, param.device))
        state["step"] += 1
        step = AdamWStep.of(
            state["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"], position, scale
        )
        low_half = self._low_halves[param]() if param in self._low_halves else None
        mean, square_mean = (self._moment(state, name, square) for name, square in _MOMENTS)
        adamw(param, low_half, grad, mean, square_mean, step)

    def _moment(self, state: Mapping[str, Any], name: str, square: bool) -> Moment:
        return Moment(state[name], state.get(f"{name}_scales"), self.moments, square)

    def exact_state(self) -> dict[str, Any]:
        """Moments and steps as CPU tensors in their own dtype, in the order of the parameters."""
        entries = []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                entries.append(
                    {k: v.detach().cpu().clone() if torch.is_tensor(v) else v for k, v in state.items()}
                )
        return {"state": entries, "state_dtype": self._state_dtype}

    @property
    def _state_dtype(self) -> str:
        """As checkpoints name it: dtypes as torch prints them."""
        return f"torch.{self.moments}" if self.moments in ("float32", "bfloat16") else self.moments

    def set_exact_state(self, saved: dict[str, Any], *, cast: bool = False) -> None:
        """Inverse of `exact_state`. torch's load_state_dict would cast the moments to the parameter's dtype.

        cast: round moments of another format to this one's instead of refusing them (a deliberate precision change).
        Raises ValueError when the number, shapes or format of the moments do not belong to these parameters.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        problems = []
        if saved["state_dtype"] != self._state_dtype and not cast:
            problems.append(f"moments are {saved['state_dtype']}, the policy wants {self._state_dtype}")
        if len(saved["state"]) != len(params):
            problems.append(f"{len(saved['state'])} entries for {len(params)} parameters")
        for i, (param, entry) in enumerate(zip(params, saved["state"], strict=False)):
            if entry and entry["exp_avg"].shape != param.shape:
                problems.append(
                    f"moments of parameter {i} are {tuple(entry['exp_avg'].shape)}, not {tuple(param.shape)}"
                )
        if problems:
            raise ValueError("optimizer state does not fit this model: " + "; ".join(problems))
        for position, (param, entry) in enumerate(zip(params, saved["state"], strict=True)):
            if entry and saved["state_dtype"] != self._state_dtype:
                entry = self._in_own_format(entry, saved["state_dtype"], position)
            self.state[param] = {
                k: v.to(param.device, copy=True) if torch.is_tensor(v) else v for k, v in entry.items()
            }

    def _in_own_format(self, entry: dict[str, Any], state_dtype: str, position: int) -> dict[str, Any]:
        format = next(f for f in MOMENT_FORMATS if f == state_dtype.removeprefix("torch."))
        words = random_words(entry["exp_avg"].numel(), random_keys(entry["step"], position))
        own: dict[str, Any] = {"step": entry["step"]}
        for name, square in _MOMENTS:
            values = load_moment(Moment(entry[name], entry.get(f"{name}_scales"), format, square))
            moment = empty_moment(values.shape, self.moments, square)
            store_moment(moment, values, words.view(values.shape))
            own |= _entries(name, moment)
        return own


def _entries(name: str, moment: Moment) -> dict[str, torch.Tensor]:
    """A moment as entries of an optimiser's state."""
    return {name: moment.values} | ({} if moment.scales is None else {f"{name}_scales": moment.scales})


def lr_factor(step: int, warmup_steps: int, decay: str, total_steps: int | None) -> float:
    """Factor on the learning rate for optimiser step `step` (0-based).

    Warm-up: (step + 1) / warmup_steps. Then "constant", or "linear"/"cosine" from 1 down to 0 at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "constant":
        return 1.0
    assert total_steps is not None, "validate() requires total_steps for a decay"
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class LossScaler:
    """Dynamic loss scaling (arXiv 1710.03740): without it small fp16 gradients flush to zero.

    Halves the scale after a step with a non-finite gradient, doubles it after `growth_interval` good ones.
    """

    def __init__(self, initial: float = 1.0, growth_interval: int | None = None):
        self.scale, self.growth_interval = initial, growth_interval
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        if self.growth_interval is None:  # no scaling asked for: the scale stays 1
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2.0, 2.0**-14), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def get_state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def set_state(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])
