"""Low-rank adapters on the linears of a `CausalLM`, and a base that is frozen under them.

Where a plan has adapters, the train side trains nothing else. Its base holds no master weights: what the GEMMs read of
it (e4m3 codes, or values in the compute dtype) lies in buffers, is made once when the model is loaded, and is exported
as it is. Tensors are named as in PEFT: ``X.lora_A.weight`` [rank, in] and ``X.lora_B.weight`` [out, rank]
for the linear X.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from precision_kernels import LowRankFormats, PreparedLowRank, Recompute, low_rank, prepare_low_rank
from precision_policies import PrecisionPolicy
from precision_policies.adapters import A, B, adapter_formats
from rllib_llm.models.layers import (
    FORMAT_DTYPES,
    PlannedLinear,
    PlannedModule,
    rollout_specs,
    rollout_tensors,
    torch_dtype,
)

if TYPE_CHECKING:
    from rllib_llm.models.causal_lm import CausalLM
    from rllib_llm.models.decoder import DecoderLayer

__all__ = [
    "AdapterInit",
    "LowRankAdapter",
    "adapter_names",
    "attach_adapters",
    "factors",
    "freeze",
    "initialise_adapters",
    "set_factor",
    "switched_off",
]

AdapterInit = Literal["default", "gaussian"]
"""How A starts (B is 0). PEFT's `init_lora_weights`: "default" is its True, uniform with bound 1 / sqrt(in); "gaussian"
is normal with deviation 1 / rank."""


class AdapterFactor(PlannedModule):
    """A or B of one adapter: a parameter on the train side, a received buffer on the rollout side."""

    adapter: LowRankAdapter

    def forget_operands(self) -> None:
        self.adapter.forget_operands()


class LowRankAdapter:
    """scale * B (A x), added to what a linear made of x.

    Args:
        a, b: the factors, children of the linear.
        scale: `AdapterSpec.scale`.
        policy: says the formats.
    """

    def __init__(self, a: AdapterFactor, b: AdapterFactor, scale: float, policy: PrecisionPolicy) -> None:
        self.a, self.b, self.scale = a, b, scale
        a.adapter = b.adapter = self
        said = adapter_formats(policy)
        self.formats = LowRankFormats(said.weight, said.inner, said.dgrad, said.wgrad, said.saved)
        self.enabled = True
        self._prepared: tuple[Any, PreparedLowRank, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As `PlannedLinear.__getstate__`."""
        return self.__dict__ | {"_prepared": None}

    def __call__(self, base: torch.Tensor, x: torch.Tensor, recompute: Recompute | None) -> torch.Tensor:
        """base [T, N] + scale * B (A x), x [T, K]; base itself while switched off."""
        if not self.enabled:
            return base
        return low_rank(base, x, self.a.weight, self.b.weight, self.prepared(), self.scale, recompute)

    def prepared(self) -> PreparedLowRank:
        """A and B as their GEMMs read them; made as often as `PlannedLinear.prepared`."""
        weights = self.a.weight, self.b.weight
        key = tuple(m.weight_key(w) for m, w in zip((self.a, self.b), weights, strict=True))
        if self._prepared is None or self._prepared[0] != key:
            # The tensors are kept too, so that neither their ids nor addresses can be given to others.
            ready = prepare_low_rank(*weights, self.formats, self.a.compute_dtype)
            self._prepared = (key, ready, weights)
        return self._prepared[1]

    def forget_operands(self) -> None:
        """Drop what was derived from A and B."""
        self._prepared = None


def attach_adapters(model: CausalLM) -> None:
    """Give every linear that has adapter rows in the plan its factors, uninitialised; freeze a train side's base."""
    spec = model.plan.adapter
    if spec is None:
        return
    if model.side == "train":
        for _, module in model.planned_modules():
            freeze(module)
    for row in model.plan.modules:
        if row.kind != "adapter" or not row.name.endswith(f".{A}"):
            continue
        name = row.name.removesuffix(f".{A}")
        linear = model.get_submodule(name)
        assert isinstance(linear, PlannedLinear)  # the plan puts adapters nowhere else
        a, b = (AdapterFactor(model.plan[f"{name}.{f}"], model.policy, model.side) for f in (A, B))
        linear.add_module(A, a)
        linear.add_module(B, b)
        linear.adapter = LowRankAdapter(a, b, spec.scale, model.policy)
    for layer in model.model.layers:
        _read_values(layer)


def _read_values(layer: Any) -> None:
    """An adapter multiplies the values of x, so a norm before one must write them, not only their codes."""
    block: DecoderLayer = layer
    groups = block.self_attn.qkv.modules, block.mlp.gate_up.modules
    block.coded_input = tuple(
        coded and all(m.adapter is None for m in group)
        for coded, group in zip(block.coded_input, groups, strict=True)
    )


def freeze(module: PlannedModule) -> None:
    """Replace a train-side module's parameters by uninitialised buffers of what its GEMMs read.

    FP8 codes with scales where both sides compute in FP8, else values rounded to the compute dtype, of which each side
    makes its operand. `PlannedModule.set_master` fills them.
    """
    if holds_codes(module):
        specs = {
            suffix: (torch_dtype(s.dtype), s.shape)
            for suffix, s in rollout_specs(module.plan, module.policy).items()
        }
    else:
        form = module.plan.train_forward
        dtype = module.compute_dtype if form == "fp8" else FORMAT_DTYPES[form]
        specs = {"weight": (dtype, tuple(module.plan.shape))}
        if module.plan.bias:
            specs["bias"] = (module.compute_dtype, tuple(module.plan.shape[:1]))
    for name in specs:
        module._parameters.pop(name, None)
        for part in ("low", "ties"):  # of split masters
            module._buffers.pop(f"{name}_{part}", None)
    for name, (dtype, shape) in specs.items():
        module.register_buffer(name, torch.empty(shape, dtype=dtype))


def holds_codes(module: PlannedModule) -> bool:
    """Whether a frozen module keeps FP8 codes and nothing that they were made of."""
    return module.plan.train_forward == module.plan.rollout_forward == "fp8"


def adapter_names(model: CausalLM) -> list[str]:
    """Names of the tensors of the adapters, as they travel: sorted by linear, A before B."""
    return [f"{row.name}.weight" for row in model.plan.modules if row.kind == "adapter"]


@torch.no_grad()
def initialise_adapters(model: CausalLM, init: AdapterInit = "default", seed: int = 0) -> None:
    """Random A, zero B: the adapted model is the base. Equal on every process for one seed, on either side."""
    generator = torch.Generator().manual_seed(seed)
    for name, factor in factors(model):
        values = torch.zeros(factor.plan.shape)
        if name.endswith(f".{A}"):
            rank, inputs = factor.plan.shape
            if init == "gaussian":
                values.normal_(0.0, 1.0 / rank, generator=generator)
            else:
                bound = 1.0 / math.sqrt(inputs)
                values.uniform_(-bound, bound, generator=generator)
        set_factor(factor, values)


def set_factor(factor: AdapterFactor, values: torch.Tensor) -> None:
    """Give A or B these values; on the rollout side as an export of them would bring them."""
    if factor.side == "train":
        factor.set_master("weight", values)
        return
    for suffix, tensor in rollout_tensors(factor.plan, factor.policy, "weight", values).items():
        getattr(factor, suffix).copy_(tensor)
    factor.forget_operands()


def factors(model: CausalLM) -> Iterator[tuple[str, AdapterFactor]]:
    """(name, factor) of every A and B."""
    for name, module in model.named_modules():
        if isinstance(module, AdapterFactor):
            yield name, module


@contextmanager
def switched_off(model: CausalLM) -> Iterator[CausalLM]:
    """While open, the model is its base: what a KL term compares with, without a second copy of the weights."""
    adapters = {factor.adapter for _, factor in factors(model)}
    before = {adapter: adapter.enabled for adapter in adapters}
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter, enabled in before.items():
            adapter.enabled = enabled
