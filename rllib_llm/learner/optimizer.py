"""AdamW with the dtypes a precision policy names, learning-rate schedules, and fp16 loss scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["LossScaler", "PolicyAdamW", "lr_factor"]


class PolicyAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are stored in `state_dtype` and whose arithmetic is fp32.

    torch.optim.AdamW keeps moments in the parameter's dtype and, for bf16 parameters, also computes in it:
    `1 - beta2 = 0.001` is then below half a bf16 ulp of the second moment, which stops growing. With fp32
    parameters and fp32 moments this class computes torch's formula.

    Args:
        params: parameters of any floating dtype; gradients may have another (fp32 accumulators).
        state_dtype: dtype of exp_avg and exp_avg_sq.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def update(self, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """One update with the given gradients (fp32, same shapes); parameters without one stay as they are."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in gradients:
                    self._update_one(param, gradients[param], group)

    def _update_one(self, param: torch.nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=self.state_dtype)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        grad = grad.float()
        weight, mean, square = param.float(), state["exp_avg"].float(), state["exp_avg_sq"].float()
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        mean.lerp_(grad, 1.0 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        denominator = (square.sqrt() / math.sqrt(1.0 - beta2 ** state["step"])).add_(group["eps"])
        weight.addcdiv_(mean, denominator, value=-group["lr"] / (1.0 - beta1 ** state["step"]))
        for stored, value in ((param, weight), (state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            if stored.data_ptr() != value.data_ptr():  # .float() of an fp32 tensor is the tensor itself
                stored.copy_(value)

    def exact_state(self) -> dict[str, Any]:
        """Moments and steps as CPU tensors in their own dtype, in the order of the parameters."""
        entries = []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                entries.append(
                    {k: v.detach().cpu().clone() if torch.is_tensor(v) else v for k, v in state.items()}
                )
        return {"state": entries, "state_dtype": str(self.state_dtype)}

    def set_exact_state(self, saved: dict[str, Any], *, cast: bool = False) -> None:
        """Inverse of `exact_state`. torch's load_state_dict would cast the moments to the parameter's dtype.

        cast: round moments of another dtype to this one's instead of refusing them (a deliberate precision change).
        Raises ValueError when the number, shapes or dtype of the moments do not belong to these parameters.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        problems = []
        if saved["state_dtype"] != str(self.state_dtype) and not cast:
            problems.append(f"moments are {saved['state_dtype']}, the policy wants {self.state_dtype}")
        if len(saved["state"]) != len(params):
            problems.append(f"{len(saved['state'])} entries for {len(params)} parameters")
        for i, (param, entry) in enumerate(zip(params, saved["state"], strict=False)):
            if entry and entry["exp_avg"].shape != param.shape:
                problems.append(
                    f"moments of parameter {i} are {tuple(entry['exp_avg'].shape)}, not {tuple(param.shape)}"
                )
        if problems:
            raise ValueError("optimizer state does not fit this model: " + "; ".join(problems))
        for param, entry in zip(params, saved["state"], strict=True):
            moved = {
                k: v.to(param.device, self.state_dtype, copy=True) if torch.is_tensor(v) else v
                for k, v in entry.items()
            }
            self.state[param] = moved


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
