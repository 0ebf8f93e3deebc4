# ruff: noqa: RUF009 - `doc` makes a dataclass field

"""The typed tree of a precision policy: what can be said about numbers, and what each key means.

No field has a default: every number of a run stands in a YAML file, none comes from code. `doc` is the single
source of the comments that `to_yaml` writes, of the descriptions in the JSON schema, and of the table in
docs/policies.md.

Operand formats have short names (fp8 = e4m3 codes with block scales), dtypes of stored tensors have torch's
names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Format = Literal["fp8", "bf16", "fp16", "fp32"]
PlainFormat = Literal["bf16", "fp16", "fp32"]
Dtype = Literal["bfloat16", "float16", "float32"]
MasterDtype = Literal["float32", "split_float32", "bfloat16"]
MomentDtype = Literal["float32", "bfloat16", "bfloat16_stochastic", "blockwise_8bit"]

FORMAT_OF_DTYPE: dict[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FORMAT_OF_MASTER: dict[str, str] = {"float32": "fp32", "split_float32": "fp32", "bfloat16": "bf16"}
"""Format of the numbers that the optimizer updates, however they are stored."""
DTYPE_OF_FORMAT: dict[str, str] = {v: k for k, v in FORMAT_OF_DTYPE.items()}

BLOCK = 128
"""Side of a scaling block (paper: Jet-RL, arXiv 2601.14243; DeepSeek-V3, arXiv 2412.19437)."""


def doc(text: str, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field described by `text`, with an inclusive range if it is a number."""
    return field(metadata=described(text, low, high))


def described(text: str, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """The metadata of `doc`, for a field with a default: a key that came later and that older files do not have."""
    return {"doc": text, "low": low, "high": high}


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How every fp8 operand is made, on both sides, anew for each tensor: there is no calibration."""

    code_format: Literal["e4m3"] = doc("8-bit float with 3 mantissa bits, largest finite value 448")
    scale_format: Literal["fp32", "ue8m0"] = doc(
        "fp32: scale = block amax / 448; ue8m0: that, rounded up to a power of two (Blackwell tensor cores)"
    )
    scale_floor: float = doc(
        "smallest scale; keeps all-zero blocks finite. Blocks with amax below 448 x floor lose bits",
        low=2.0**-126,
        high=1e-6,
    )
    rounding: Literal["nearest_even"] = doc("rounding of value / scale to a code; values beyond 448 saturate")
    activation_block: Literal["1x128"] = doc(
        "activations and gradients: one scale per token and 128 features"
    )
    column_block: Literal["128x1"] = doc(
        "operands of the fp8 wgrad GEMM: one scale per 128 tokens and feature"
    )
    weight_block: Literal["128x128"] = doc("weights: one scale per 128 x 128 block")
    weight_source: Literal["compute_dtype"] = doc(
        "master weights are rounded to compute_dtype before they are quantised, on both sides alike"
    )


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Projections of attention and MLP, and MoE experts: the three GEMMs, each on its own."""

    train_forward: Format = doc("operands of Y = X W^T in the learner")
    rollout_forward: Format = doc("operands of Y = X W^T in the rollout engine")
    dgrad: Format = doc("operands of dX = dY W")
    wgrad: Format = doc("operands of dW = dY^T X")
    saved: Format = doc("X as kept for the backward pass")
    accumulation: Literal["fp32"] = doc("of partial products, across blocks of 128")


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """The projection to the vocabulary; its fp32 logits go into the log-softmax."""

    train_forward: PlainFormat = doc("operands in the learner")
    rollout_forward: PlainFormat = doc("operands in the rollout engine")
    dgrad: PlainFormat = doc("operands of the gradient of its input")
    wgrad: PlainFormat = doc("operands of the gradient of its weight")
    saved: PlainFormat = doc("its input as kept for the backward pass")
    accumulation: Literal["fp32"] = doc("of partial products, and of the logits it returns")


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Token embedding table (a lookup: no arithmetic in the forward pass)."""

    train_forward: PlainFormat = doc("format of the rows read by the learner")
    rollout_forward: PlainFormat = doc("format of the rows read by the rollout engine")
    wgrad: Literal["master_dtype"] = doc("gradients of rows that occur more than once are summed in it")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm, with the residual addition in front of it; per-head q/k norms too."""

    train_forward: PlainFormat = doc("format of its input and output in the learner")
    rollout_forward: PlainFormat = doc("format of its input and output in the rollout engine")
    statistics: Literal["fp32"] = doc(
        "mean of squares and its root; the normalised row is rounded to compute_dtype, then multiplied by the weight"
    )
    residual: PlainFormat = doc("the residual stream: the sum is rounded to this before it is normalised")
    saved: PlainFormat = doc("its input as kept for the backward pass")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Rotary embedding, Q K^T, softmax, P V."""

    train_forward: PlainFormat = doc("format of Q, K, V and of the output in the learner")
    rollout_forward: PlainFormat = doc("format of Q, K, V and of the output in the rollout engine")
    softmax: Literal["fp32"] = doc("scores, maximum, exponential and normaliser")
    accumulation: Literal["fp32"] = doc("of P V")
    backward: PlainFormat = doc("format of dQ, dK, dV")
    saved: PlainFormat = doc("Q, K, V and output as kept for the backward pass (log-sum-exp is fp32)")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The gated activation of the MLP (SiLU(gate) * up)."""

    train_forward: PlainFormat = doc("format of its inputs and output in the learner")
    rollout_forward: PlainFormat = doc("format of its inputs and output in the rollout engine")
    internal: Literal["fp32"] = doc(
        "arithmetic; SiLU(gate) and the product are each rounded to compute_dtype"
    )
    saved: Format = doc("its inputs as kept for the backward pass, which recomputes the product from them")


@dataclass(frozen=True, kw_only=True)
class Router:
    """The gate of a mixture of experts. Its choice is discrete: one flipped bit sends a token elsewhere."""

    train_forward: PlainFormat = doc("operands in the learner")
    rollout_forward: PlainFormat = doc("operands in the rollout engine")
    accumulation: Literal["fp32"] = doc("of partial products, softmax and top-k")


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values kept by the rollout engine."""

    format: PlainFormat = doc(
        "format of cached keys and values; equal to attention's, as the learner has no cache"
    )


@dataclass(frozen=True, kw_only=True)
class Exempt:
    """Linear modules that stay in compute_dtype where `linear` says fp8, on both sides."""

    modules: tuple[str, ...] = doc(
        "patterns over whole dotted names: '*' and '?' stay inside one part, '**' is any number of parts; "
        "resolved to names once, a pattern that matches nothing is refused"
    )
    first_layers: int = doc("number of decoder layers exempt at the start", low=0, high=10_000)
    last_layers: int = doc("number of decoder layers exempt at the end", low=0, high=10_000)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters: y = W x + bias, rounded; then y + scale * B (A x), rounded once more. Equal on both sides."""

    weight: PlainFormat = doc("A and B as their GEMMs read them: rounded from their master weights")
    inner: PlainFormat = doc("A x is rounded to this before it is multiplied by B")
    dgrad: PlainFormat = doc("operands of the gradients of x and of A x")
    wgrad: PlainFormat = doc("operands of the gradients of A and B")
    saved: PlainFormat = doc("x and A x as kept for the backward pass")
    accumulation: Literal["fp32"] = doc("of partial products, and of B (A x), which is not rounded")
    addition: Literal["after_bias"] = doc(
        "scale * B (A x) in fp32 is added to W x + bias, which is rounded to compute_dtype as without an adapter; the "
        "sum is rounded to compute_dtype once"
    )
    gradient: Literal["fp32"] = doc("gradients of A and B; the base has none")


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """What 'log-probability of a sampled token' means; the same on both sides."""

    dtype: Literal["float32"] = doc("logits, log-softmax and stored log-probs")
    temperature: Literal["scaled", "refuse"] = doc(
        "scaled: of the distribution after division of the logits by T, on both sides; refuse: only T = 1"
    )
    truncation: Literal["renormalise", "refuse"] = doc(
        "top-k / top-p: renormalise over the kept tokens on both sides, or refuse such sampling"
    )


CorrectionKind = Literal[
    "none",
    "tis_token",
    "tis_sequence",
    "icepop",
    "mis_token",
    "mis_sequence",
    "geometric_mask",
    "product_mask",
]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance correction for samples drawn under numerics that are not the learner's."""

    kind: CorrectionKind = doc(
        "tis_*: truncate the ratio at upper; icepop, mis_*: drop what lies outside lower..upper; "
        "geometric_mask, product_mask: drop whole sequences by mean or summed log-ratio"
    )
    lower: float | None = doc("lower bound of the ratio train / rollout, or null", low=0.0, high=1.0)
    upper: float | None = doc("upper bound of the ratio train / rollout, or null", low=1.0, high=1e6)
    veto: float | None = doc(
        "drop a sequence that has a token with a ratio below this, or null", low=0.0, high=1.0
    )
    when: Literal["always", "guard"] = doc("always: from the first update; guard: once the guard has fired")
    accept_uncorrected: bool = doc("must be true to run an off-policy precision without a correction")


@dataclass(frozen=True, kw_only=True)
class ClipCalibration:
    """Clip range widened by the measured quantisation noise of the ratio (arXiv 2609.22870)."""

    enabled: bool = doc("off by default: it changes the objective")
    strength: float = doc(
        "multiplier of the measured noise that is added to the clip range", low=0.0, high=100.0
    )


GuardMetric = Literal["max_abs", "mean_abs", "k3", "bit_equal_share"]
GuardAction = Literal["warn", "correct", "halt"]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How much train-rollout mismatch is tolerated, and what happens beyond it."""

    metric: GuardMetric = doc("of log-prob differences over the sampled tokens of one iteration")
    tolerance: float = doc(
        "largest metric tolerated; for bit_equal_share the largest share of tokens that may differ",
        low=0.0,
        high=1e3,
    )
    action: GuardAction = doc("warn: log; correct: switch on `correction`; halt: checkpoint and stop")
    patience: int = doc("consecutive iterations beyond tolerance before the action", low=1, high=1_000_000)


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scale: fp16 gradients below 6e-8 are zero, so the loss is multiplied before backward."""

    initial: float = doc("first scale; halved when a gradient overflows", low=1.0, high=2.0**40)
    growth_interval: int = doc("steps without overflow before the scale is doubled", low=1, high=1_000_000)
