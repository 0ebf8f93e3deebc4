"""Embedding, norms and projections that follow a `ModulePlan`, on the train side and on the rollout side.

Train side: `nn.Parameter`s in the policy's master dtype. What enters an operator is the master rounded to the
compute dtype; an fp8 operand is that rounded weight quantised once per optimiser step. Rollout side: buffers
that are exactly the tensors of a `WeightUpdate` (names, dtypes, bytes); nothing is quantised there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from precision_kernels import (
    Coded,
    LinearFormats,
    PreparedWeight,
    Quantised,
    Remake,
    add_rms_norm,
    add_rms_norm_quantise,
    linears,
    linears_of_codes,
    prepare_weight,
    quantise_weight,
    rms_norm,
    rms_norm_coded,
    rms_norm_quantise,
)
from precision_policies import ModulePlan, PrecisionPolicy
from rllib_llm.sync.packed import SCALE_SUFFIX, dtype_name
from rllib_llm.sync.verify import TensorSpec

if TYPE_CHECKING:
    from rllib_llm.models.joint import JointProjections

Side = Literal["train", "rollout"]
ScaleFormat = Literal["fp32", "ue8m0"]
FORMAT_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class _OptimiserSteps:
    """How many optimiser steps this process has taken: torch's fused AdamW does not raise a tensor's version counter
    (torch 2.13: 4 before and after a step; foreach and plain: +2), so the counter alone would leave old codes in use.
    """

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


_STEPS = _OptimiserSteps()


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def rollout_tensors(
    plan: ModulePlan, policy: PrecisionPolicy, parameter: str, master: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the rollout side holds for one master parameter of a module: the one place where weights are quantised
    for it.

    Args:
        parameter: "weight" or "bias".
        master: any float dtype, the module's HF shape.

    Returns:
        Suffix of the module's name -> tensor: ``weight`` e4m3 and ``weight_scale_inv`` fp32, or one plain tensor.
        Values are first rounded to the compute dtype (policy key `quantisation.weight_source`).
    """
    compute = torch_dtype(policy.compute_dtype)
    if parameter == "weight" and plan.rollout_forward == "fp8":
        quantised = quantise_weight(master.to(compute), *scale_rule(policy))
        return {"weight": quantised.codes, "weight" + SCALE_SUFFIX: quantised.scales}
    return {parameter: master.to(compute).to(_plain_dtype(plan, "rollout", compute))}


def rollout_specs(plan: ModulePlan, policy: PrecisionPolicy) -> dict[str, TensorSpec]:
    """Suffix -> dtype and shape of what `rollout_tensors` gives for all parameters of a module."""
    compute = torch_dtype(policy.compute_dtype)
    plain = dtype_name(_plain_dtype(plan, "rollout", compute))
    if plan.rollout_forward == "fp8":
        blocks = tuple(-(-n // 128) for n in plan.shape)
        specs = {
            "weight": TensorSpec(dtype_name(FORMAT_DTYPES["fp8"]), plan.shape),
            "weight" + SCALE_SUFFIX: TensorSpec("float32", blocks),
        }
    else:
        specs = {"weight": TensorSpec(plain, plan.shape)}
    if plan.bias:
        specs["bias"] = TensorSpec(dtype_name(compute), (plan.shape[0],))
    return specs


def scale_rule(policy: PrecisionPolicy) -> tuple[ScaleFormat, float]:
    """(scale format, scale floor) of every fp8 operand, as the operators take them."""
    return cast(ScaleFormat, policy.scale_format), policy.scale_floor


def _plain_dtype(plan: ModulePlan, side: Side, compute: torch.dtype) -> torch.dtype:
    """dtype of operands that are not quantised."""
    form = plan.train_forward if side == "train" else plan.rollout_forward
    return compute if form == "fp8" else FORMAT_DTYPES[form]


class PlannedModule(nn.Module):
    """A module with HF-named tensors: parameters on the train side, received buffers on the rollout side."""

    bias: torch.Tensor | None

    def __init__(
        self, plan: ModulePlan, policy: PrecisionPolicy, side: Side, owns_tensors: bool = True
    ) -> None:
        super().__init__()
        self.plan, self.policy, self.side = plan, policy, side
        self.compute_dtype = torch_dtype(policy.compute_dtype)
        if not (owns_tensors and plan.bias):
            self.register_parameter("bias", None)
        if not owns_tensors:
            return
        if side == "train":
            master = torch_dtype(policy.master_dtype)
            self.weight = nn.Parameter(torch.empty(plan.shape, dtype=master))
            if plan.bias:
                self.bias = nn.Parameter(torch.empty(plan.shape[0], dtype=master))
        else:
            for suffix, spec in rollout_specs(plan, policy).items():
                self.register_buffer(suffix, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)))

    def export(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor for the rollout side, from the train side's master parameters."""
        tensors: dict[str, torch.Tensor] = {}
        for suffix, parameter in self.named_parameters(recurse=False):
            tensors |= rollout_tensors(self.plan, self.policy, suffix, parameter.detach())
        return tensors

    def weight_key(self, weight: torch.Tensor) -> tuple[int, ...]:
        """Changes when the weight does: its identity, address, version, and the optimiser steps taken."""
        return (
            id(weight), weight.data_ptr(), weight._version, _STEPS.count if self.side == "train" else 0,
        )  # fmt: skip

    def forget_operands(self) -> None:
        """Drop what was derived from the weights; to be called when they changed in a way autograd does not see."""


class PlannedEmbedding(PlannedModule):
    """Token id -> row of the table, in the compute dtype."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]. Rows are rounded after the lookup: same values, and gradients sum in the "
        "master dtype."""
        return nn.functional.embedding(ids, self.weight).to(self.compute_dtype)


class PlannedNorm(PlannedModule):
    """RMSNorm over the last dimension, with or without the residual addition in front."""

    def __init__(self, plan: ModulePlan, policy: PrecisionPolicy, side: Side, eps: float) -> None:
        super().__init__(plan, policy, side)
        self.eps = eps
        self._rounding: tuple[tuple[Any, ...], torch.Tensor, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As `PlannedLinear.__getstate__`."""
        return self.__dict__ | {"_rounding": None}

    def _rounded(self) -> torch.Tensor:
        """The weight as it is multiplied by, in the compute dtype; rounded once per change."""
        weight = self.weight
        if weight.dtype == self.compute_dtype:
            return weight.detach()
        # Autograd saves no tensor that was made in inference mode.
        key = (*self.weight_key(weight), torch.is_inference_mode_enabled())
        if self._rounding is None or self._rounding[0] != key:
            # The tensor itself is kept too, so that neither its id nor its address can be given to another one.
            self._rounding = (key, weight.detach().to(self.compute_dtype), weight)
        return self._rounding[1]

    def forget_operands(self) -> None:
        self._rounding = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]. The gradient of the master is not rounded."""
        return rms_norm(x, self.weight, self.eps, self._rounded())

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised, new residual) of ``x + residual``; without a residual x itself is the new one."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self._rounded())

    def remake(self, residual: torch.Tensor) -> Remake:
        """How `add` made its first result from its second, which is kept for the norm's own gradient anyway."""
        eps = self.eps
        return Remake(lambda rows, weight: rms_norm(rows, weight, eps), (residual.detach(), self._rounded()))

    def add_coded(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Coded, torch.Tensor]:
        """`add` for training, where only fp8 linears read the normalised rows: those are never written."""
        return rms_norm_coded(x, residual, self.weight, self.eps, self._rounded(), *scale_rule(self.policy))

    def add_quantise(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Quantised, torch.Tensor]:
        """`add` with the 1x128 codes of the normalised rows in their place, for inference; one kernel, same bits."""
        if residual is None:
            return rms_norm_quantise(x, self._rounded(), self.eps, *scale_rule(self.policy)), x
        return add_rms_norm_quantise(x, residual, self._rounded(), self.eps, *scale_rule(self.policy))


class PlannedLinear(PlannedModule):
    """A projection (or lm_head) whose three GEMMs run in the formats of its plan.

    A tied lm_head owns no tensor; `logits` is then given the embedding table.
    """

    def __init__(self, plan: ModulePlan, policy: PrecisionPolicy, side: Side, tied: bool = False) -> None:
        super().__init__(plan, policy, side, owns_tensors=not tied)
        form = plan.train_forward if side == "train" else plan.rollout_forward
        scale = scale_rule(policy)
        if side == "train":
            self.formats = LinearFormats(form, plan.dgrad, plan.wgrad, plan.saved, *scale)
        else:  # no backward here: the last three are not used
            self.formats = LinearFormats(form, *(("fp8",) * 3 if form == "fp8" else (form,) * 3), *scale)
        self._prepared: tuple[tuple[int, ...], PreparedWeight, torch.Tensor] | None = None
        self.joint: JointProjections | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy, without what `prepared` makes again: it is known by addresses of this process, and
        torch 2.13 cannot load a plain pickle of e4m3 tensors."""
        return self.__dict__ | {"_prepared": None}

    def source(self, weight: torch.Tensor) -> torch.Tensor | Quantised:
        """The weight as it is prepared from: a received fp8 weight with its scales, else the tensor."""
        if weight.dtype != FORMAT_DTYPES["fp8"]:
            return weight
        scales = getattr(self, "weight" + SCALE_SUFFIX)
        return Quantised(weight, scales, "128x128", self.formats.scale_format)

    def prepared(self, weight: torch.Tensor | None = None) -> PreparedWeight:
        """The weight as its GEMMs read it: made once per optimiser step or other in-place change."""
        if self.joint is not None:
            return self.joint.part(self)
        weight = self.weight if weight is None else weight
        key = self.weight_key(weight)
        if self._prepared is None or self._prepared[0] != key:
            # The tensor itself is kept too, so that neither its id nor its address can be given to another one.
            ready = prepare_weight(self.source(weight), self.formats, self.compute_dtype)
            self._prepared = (key, ready, weight)
        return self._prepared[1]

    def forget_operands(self) -> None:
        self._prepared = None
        if self.joint is not None:
            self.joint.forget_operands()

    def export(self) -> dict[str, torch.Tensor]:
        """As `PlannedModule.export`; an fp8 weight is the very codes that the learner's next forward multiplies by.

        Call `forget_operands` first if the weight may have changed in a way autograd does not see.
        """
        if not (self.plan.train_forward == self.plan.rollout_forward == "fp8"):
            return super().export()
        quantised = self.prepared().quantised
        assert quantised is not None  # train_forward is fp8
        tensors = {"weight": quantised.codes, "weight" + SCALE_SUFFIX: quantised.scales}
        if self.bias is not None:
            tensors |= rollout_tensors(self.plan, self.policy, "bias", self.bias.detach())
        return tensors

    def forward(self, x: torch.Tensor | Quantised, remake: Remake | None = None) -> torch.Tensor:
        """[T, K], or its 1x128 codes -> [T, N] in the compute dtype; ``remake`` as in `linears`."""
        if isinstance(x, Quantised):
            return linears_of_codes(x, [self.prepared()], [self.bias], self.compute_dtype)[0]
        operands = [self._operand()], [self.bias]
        return linears(x, *operands, self.formats, [self.prepared()], remake=remake)[0]

    def _operand(self) -> Any:
        return self.weight if self.side == "train" else self.prepared()

    def logits(self, hidden: torch.Tensor, tied_weight: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] -> fp32 [T, V]: operands in the plan's format, the product not rounded below fp32."""
        weight = self.weight if tied_weight is None else tied_weight
        prepared = [self.prepared(weight)]
        return linears(hidden, [weight], [None], self.formats, prepared, out_dtype=torch.float32)[0]
