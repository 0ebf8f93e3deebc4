"""precision_kernels: the numerical operators that learner and rollout engine share. It knows tensors only.

* `reference/`  the definition of every operator, in plain torch, on any device; on CPU it is what runs.
* `triton/`     the same operators as Triton kernels, for CUDA and for Triton's interpreter.
* `hopper/`     the same operators by libraries of Hopper GPUs: DeepGEMM, cuBLASLt, FlashAttention-3.
* `autograd/`   what models call: `operators` and `distributions` are the differentiable operators; `linear` is the
  linear layer with its three GEMMs in the formats of a precision policy; `feed_forward`, `heads`, `coded` fuse what
  stands between linears; `low_rank` is the adapter on a linear.
* `dispatch`    what is bound where, by name, version and source hash; no silent fallback.
"""

from precision_kernels.autograd.coded import Coded, readable_as_codes, rms_norm_coded
from precision_kernels.autograd.distributions import log_softmax, token_logprobs
from precision_kernels.autograd.feed_forward import gated_feed_forward, gated_feed_forward_problems
from precision_kernels.autograd.heads import rotary_of_projections
from precision_kernels.autograd.linear import linear, linears, linears_of_codes
from precision_kernels.autograd.low_rank import (
    LowRankFormats,
    PreparedLowRank,
    low_rank,
    prepare_low_rank,
)
from precision_kernels.autograd.operators import (
    adamw,
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
from precision_kernels.autograd.prepared import (
    JointWeight,
    LinearFormats,
    PreparedWeight,
    joinable,
    prepare_joint,
    prepare_weight,
    rows_of_one,
)
from precision_kernels.autograd.weight_gradient import Recompute, accumulate_in_place
from precision_kernels.bindings import TRITON_GEMMS
from precision_kernels.declaration import Implementation
from precision_kernels.dispatch import (
    UnboundOperatorError,
    bind,
    bind_library,
    bind_reference,
    bound_implementations,
    require,
)
from precision_kernels.reference.adamw import AdamWStep
from precision_kernels.reference.formats import BLOCK, FP8, FP8_MAX, SCALE_FLOOR, Quantised
from precision_kernels.reference.layout import AttentionLayout
from precision_kernels.reference.master import LowHalf, empty_low_half, join_float32, split_float32
from precision_kernels.reference.moments import (
    MOMENT_FORMATS,
    Moment,
    empty_moment,
    load_moment,
    random_keys,
    random_words,
    store_moment,
)

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "MOMENT_FORMATS",
    "SCALE_FLOOR",
    "TRITON_GEMMS",
    "AdamWStep",
    "AttentionLayout",
    "Coded",
    "Implementation",
    "JointWeight",
    "LinearFormats",
    "LowHalf",
    "LowRankFormats",
    "Moment",
    "PreparedLowRank",
    "PreparedWeight",
    "Quantised",
    "Recompute",
    "UnboundOperatorError",
    "accumulate_in_place",
    "adamw",
    "add_rms_norm",
    "add_rms_norm_quantise",
    "allocate_kv_cache",
    "attention",
    "bind",
    "bind_library",
    "bind_reference",
    "block_fp8_matmul",
    "bound_implementations",
    "dgrad_fp8_matmul",
    "empty_low_half",
    "empty_moment",
    "gated_feed_forward",
    "gated_feed_forward_problems",
    "invariant_matmul",
    "join_float32",
    "joinable",
    "linear",
    "linears",
    "linears_of_codes",
    "load_moment",
    "log_softmax",
    "low_rank",
    "norm_rotary",
    "prepare_joint",
    "prepare_low_rank",
    "prepare_weight",
    "quantise_activation",
    "quantise_columns",
    "quantise_weight",
    "random_keys",
    "random_words",
    "readable_as_codes",
    "require",
    "rms_norm",
    "rms_norm_coded",
    "rms_norm_quantise",
    "rotary",
    "rotary_cos_sin",
    "rotary_of_projections",
    "rows_of_one",
    "silu_mul",
    "silu_mul_quantise",
    "split_float32",
    "store_moment",
    "tensor_digest",
    "token_logprobs",
    "wgrad_fp8_matmul",
]
