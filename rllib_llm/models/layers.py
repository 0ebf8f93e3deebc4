"""Embedding, norms and projections that follow a `ModulePlan`, on the train side and on the rollout side.

Train side: `nn.Parameter`s in the policy's master dtype. What enters an operator is the master rounded to the
compute dtype; an fp8 operand is that rounded weight quantised once per optimiser step. Rollout side: buffers
that are exactly the tensors of a `WeightUpdate` (names, dtypes, bytes); nothing is quantised there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from precision_kernels import (
    Coded,
    LinearFormats,
    LowHalf,
    PreparedWeight,
    Quantised,
    Recompute,
    add_rms_norm,
    add_rms_norm_quantise,
    empty_low_half,
    join_float32,
    linears,
    linears_of_codes,
    prepare_weight,
    quantise_weight,
    rms_norm,
    rms_norm_coded,
    rms_norm_quantise,
    split_float32,
)
from precision_policies import ModulePlan, PrecisionPolicy
from rllib_llm.weights.format import SCALE_SUFFIX, TensorSpec, dtype_name

if TYPE_CHECKING:
    from rllib_llm.models.adapters import LowRankAdapter
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


def master_dtype(policy: PrecisionPolicy) -> torch.dtype:
    """dtype of the numbers that the optimiser updates, in however many parts they are stored."""
    return torch.float32 if policy.master_dtype == "split_float32" else torch_dtype(policy.master_dtype)


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

    weight: torch.Tensor
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
            self._add_master("weight", plan.shape)
            if plan.bias:
                self._add_master("bias", plan.shape[:1])
        else:
            for suffix, spec in rollout_specs(plan, policy).items():
                self.register_buffer(suffix, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)))

    def _add_master(self, name: str, shape: tuple[int, ...]) -> None:
        """A parameter; under split_float32 high halves, and buffers `{name}_low`, `{name}_ties` with the rest."""
        if self.policy.master_dtype != "split_float32":
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=master_dtype(self.policy))))
            return
        parameter = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32  # the number that is trained is the FP32 one
        self.register_parameter(name, parameter)
        for part, tensor in empty_low_half(shape)._asdict().items():
            self.register_buffer(f"{name}_{part}", tensor)

    def low_half(self, name: str) -> LowHalf | None:
        """What parameter ``name`` lacks of its FP32 numbers; None where it is the whole master."""
        low = getattr(self, f"{name}_low", None)
        return None if low is None else LowHalf(low, getattr(self, f"{name}_ties"))

    @property
    def frozen(self) -> bool:
        """Whether the train side trains other modules than this one, whose tensors are buffers (`models.adapters`)."""
        return self.side == "train" and "weight" in self._buffers

    @torch.no_grad()
    def set_master(self, name: str, values: torch.Tensor) -> None:
        """Give parameter ``name`` these values of its shape, in any float dtype, rounded to the master's.

        A frozen module keeps of them what its GEMMs read.
        """
        if self.frozen:
            self._set_frozen(name, values.to(master_dtype(self.policy)))
            return
        parameter, low_half = getattr(self, name), self.low_half(name)
        if low_half is None:
            parameter.copy_(values)
            return
        high, rest = split_float32(values.to(parameter.device, torch.float32))
        parameter.copy_(high)
        low_half.low.copy_(rest.low)
        low_half.ties.copy_(rest.ties)

    def _set_frozen(self, name: str, values: torch.Tensor) -> None:
        """`models.adapters.freeze` says what is kept."""
        parts = {name: values.to(self.compute_dtype)}
        if "weight" + SCALE_SUFFIX in self._buffers:
            parts = rollout_tensors(self.plan, self.policy, name, values)
        for suffix, tensor in parts.items():
            getattr(self, suffix).copy_(tensor)
        self.forget_operands()

    def master(self, name: str) -> torch.Tensor:
        """The numbers of parameter ``name`` that the optimiser updates, in the master's dtype."""
        parameter, low_half = getattr(self, name).detach(), self.low_half(name)
        return parameter if low_half is None else join_float32(parameter, low_half)

    def export(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor for the rollout side, from the train side's master parameters."""
        tensors: dict[str, torch.Tensor] = {}
        for suffix in ("weight", "bias"):  # parameters, or buffers of a frozen base
            if (held := getattr(self, suffix)) is not None:
                tensors |= rollout_tensors(self.plan, self.policy, suffix, held.detach())
        return tensors

    def weight_key(self, weight: torch.Tensor) -> tuple[int, ...]:
        """Changes when the weight does: identity, address, version, and the optimiser steps where it is trained."""
        steps = _STEPS.count if self.side == "train" and weight.requires_grad else 0
        return id(weight), weight.data_ptr(), weight._version, steps

    def forget_operands(self) -> None:
        """Drop what was derived from the weights; to be called when they changed in a way autograd does not see."""


class PlannedEmbedding(PlannedModule):
    """Token id -> row of the table, in the compute dtype."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]. Rows are rounded after the lookup: same values, and gradients sum in the
        master dtype."""
        if self.low_half("weight") is not None:
            return _SplitRows.apply(ids, self.weight)
        return nn.functional.embedding(ids, self.weight).to(self.compute_dtype)


class _SplitRows(torch.autograd.Function):
    """Rows of the high halves of FP32 masters. Their gradient is that of FP32 rows rounded after the lookup."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad.float(), ids, ctx.rows, -1, False)


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

    def recompute(self, residual: torch.Tensor) -> Recompute:
        """How `add` made its first result from its second, which is kept for the norm's own gradient anyway."""
        eps = self.eps
        return Recompute(
            lambda rows, weight: rms_norm(rows, weight, eps), (residual.detach(), self._rounded())
        )

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
        self.adapter: LowRankAdapter | None = None

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

    def forward(self, x: torch.Tensor | Quantised, recompute: Recompute | None = None) -> torch.Tensor:
        """[T, K], or its 1x128 codes -> [T, N] in the compute dtype; ``recompute`` as in `linears`."""
        if isinstance(x, Quantised):
            return linears_of_codes(x, [self.prepared()], [self.bias], self.compute_dtype)[0]
        operands = [self._operand()], [self.bias]
        base = linears(x, *operands, self.formats, [self.prepared()], recompute=recompute)[0]
        return self.adapted(base, x, recompute)

    def adapted(self, base: torch.Tensor, x: torch.Tensor, recompute: Recompute | None) -> torch.Tensor:
        """This linear's output ``base`` [T, N] with what its adapter, if it has one, makes of x [T, K]."""
        return base if self.adapter is None else self.adapter(base, x, recompute)

    def _operand(self) -> Any:
        return self.prepared() if self.side == "rollout" or self.frozen else self.weight

    def logits(self, hidden: torch.Tensor, tied_weight: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] -> fp32 [T, V]: operands in the plan's format, the product not rounded below fp32."""
        weight = self.weight if tied_weight is None else tied_weight
        prepared = [self.prepared(weight)]
        return linears(hidden, [weight], [None], self.formats, prepared, out_dtype=torch.float32)[0]
