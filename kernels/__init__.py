"""precision_kernels: the numerical operators that learner and rollout engine share. It knows tensors only.

* `reference/`  the definition of every operator, in plain torch, on any device; on CPU it is what runs.
* `operators`, `distributions`   the differentiable operators that models call, dispatched on the device.
* `linear`      the linear layer with its three GEMMs in the formats of a precision policy.
* `feed_forward`, `heads`, `coded`: what stands between linears, as one function with them or with its neighbours.
* `dispatch`    what is bound where, by name, version and source hash; no silent fallback.
"""

from precision_kernels.coded import Coded, readable_as_codes, rms_norm_coded
from precision_kernels.dispatch import (
    Implementation,
    UnboundOperatorError,
    bind,
    bind_reference,
    bound_implementations,
)
from precision_kernels.distributions import log_softmax, token_logprobs
from precision_kernels.feed_forward import gated_feed_forward, gated_feed_forward_problems
from precision_kernels.heads import rotary_of_projections
from precision_kernels.linear import linear, linears, linears_of_codes
from precision_kernels.operators import (
    add_rms_norm,
    add_rms_norm_quantise,
    allocate_kv_cache,
    attention,
    block_fp8_matmul,
    dgrad_fp8_matmul,
    invariant_matmul,
    norm_rotary,
    quantise_activation,
    quantise_columns,
    quantise_weight,
    rms_norm,
    rms_norm_quantise,
    rotary,
    rotary_cos_sin,
    silu_mul,
    silu_mul_quantise,
    tensor_digest,
    wgrad_fp8_matmul,
)
from precision_kernels.prepared import (
    JointWeight,
    LinearFormats,
    PreparedWeight,
    joinable,
    prepare_joint,
    prepare_weight,
    rows_of_one,
)
from precision_kernels.reference.formats import BLOCK, FP8, FP8_MAX, SCALE_FLOOR, Quantised
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.weight_gradient import Remake, accumulate_in_place

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "SCALE_FLOOR",
    "AttentionLayout",
    "Coded",
    "Implementation",
    "JointWeight",
    "LinearFormats",
    "PreparedWeight",
    "Quantised",
    "Remake",
    "UnboundOperatorError",
    "accumulate_in_place",
    "add_rms_norm",
    "add_rms_norm_quantise",
    "allocate_kv_cache",
    "attention",
    "bind",
    "bind_reference",
    "block_fp8_matmul",
    "bound_implementations",
    "dgrad_fp8_matmul",
    "gated_feed_forward",
    "gated_feed_forward_problems",
    "invariant_matmul",
    "joinable",
    "linear",
    "linears",
    "linears_of_codes",
    "log_softmax",
    "norm_rotary",
    "prepare_joint",
    "prepare_weight",
    "quantise_activation",
    "quantise_columns",
    "quantise_weight",
    "readable_as_codes",
    "rms_norm",
    "rms_norm_coded",
    "rms_norm_quantise",
    "rotary",
    "rotary_cos_sin",
    "rotary_of_projections",
    "rows_of_one",
    "silu_mul",
    "silu_mul_quantise",
    "tensor_digest",
    "token_logprobs",
    "wgrad_fp8_matmul",
]
