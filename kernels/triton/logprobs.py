"""Log-probabilities of sampled tokens and log-softmax of :mod:`precision_kernels.reference.logprobs`, row by row.

One program per row reads the logits twice (maximum, then sum of exponentials) in chunks of 2048 and keeps nothing of
vocabulary size. Chunks are added elementwise and folded once, the order of ``reference.exact.lane_sum``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precision_kernels.declaration import implements
from precision_kernels.reference.exact import SUM_LANES
from precision_kernels.reference.logprobs import check_ids, check_logits
from precision_kernels.registration import fake, operator
from precision_kernels.triton.launch import VERSION, cdiv, next_power_of_2
from precision_kernels.triton.numerics import exp, fold, log


@triton.jit
def _scaled(logits, columns, mask, temperature, SCALE: tl.constexpr):
    """A chunk [1, W] of z = logits / temperature; -inf outside the row."""
    z = tl.load(logits + columns, mask, float("-inf"))
    return tl.div_rn(z, tl.zeros(z.shape, tl.float32) + temperature) if SCALE else z


@triton.jit
def _row_maximum(logits, V, temperature, SCALE: tl.constexpr, WIDTH: tl.constexpr):
    """max z as [1], NaN if any is NaN, as torch's amax."""
    # Lane maxima in registers over chunks of the row; they meet once, at the end.
    lanes = tl.arange(0, WIDTH)[None, :]
    top = tl.full((1, WIDTH), float("-inf"), tl.float32)
    for start in range(0, V, WIDTH):
        z = _scaled(logits, start + lanes, start + lanes < V, temperature, SCALE)
        top = tl.maximum(top, z, propagate_nan=tl.PropagateNan.ALL)
    # A reduction may drop NaN, so it is counted apart.
    poisoned = tl.max((top != top).to(tl.int32), 1) > 0
    return tl.where(poisoned, float("nan"), tl.max(top, 1))


@triton.jit
def _token_kernel(
    logits, ids, logp, entropy, lse, V, row_stride, temperature,
    SCALE: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    # A program per row. First read: the maximum.
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lanes = tl.arange(0, WIDTH)[None, :]
    top = _row_maximum(logits, V, temperature, SCALE, WIDTH)
    # Second read: e^(z - m), added elementwise 2048 apart into lanes, the first level of `lane_sum`. Nothing of
    # vocabulary size is kept; with many rows one warp holds all lanes, with few eight warps share them (`_launch`).
    lane_sums = tl.zeros((1, WIDTH), tl.float32)
    weighted_sums = tl.zeros((1, WIDTH), tl.float32)
    for start in range(0, V, WIDTH):
        mask = start + lanes < V
        shifted = _scaled(logits, start + lanes, mask, temperature, SCALE) - top[:, None]
        e = tl.where(mask, exp(shifted), 0.0)
        lane_sums += e
        if ENTROPY:
            weighted_sums += tl.where(e > 0, e * shifted, 0.0)
    # The upper levels of the tree, once per row.
    total = fold(lane_sums, LOG2)
    log_total = log(total)
    # The chosen logit is read again, alone, and handled as the others.
    one = tl.zeros((1,), tl.int64)
    chosen = _scaled(logits, tl.load(ids + row + one), one == 0, temperature, SCALE) - top
    tl.store(logp + row + one, chosen - log_total)
    tl.store(lse + row + one, top + log_total)
    if ENTROPY:
        tl.store(entropy + row + one, log_total - tl.div_rn(fold(weighted_sums, LOG2), total))


@triton.jit
def _token_backward_kernel(
    dlogp, dentropy, logits, ids, lse, entropy, dlogits, V, row_stride, temperature,
    SCALE: tl.constexpr, LOGP: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A program per row and chunk: with the log-sum-exp saved, no element waits for another.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < V
    log_p = _scaled(logits + row * row_stride, columns, mask, temperature, SCALE) - tl.load(lse + row)
    p = exp(log_p)
    # Terms in the order of the definition, each only if its gradient is there.
    grad = tl.zeros((WIDTH,), tl.float32)
    if LOGP:
        g = tl.load(dlogp + row)
        grad = tl.where(columns == tl.load(ids + row), g - p * g, -(p * g))
    if ENTROPY:
        slope = tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
        grad -= slope * tl.load(dentropy + row)
    if SCALE:
        grad = tl.div_rn(grad, tl.zeros((WIDTH,), tl.float32) + temperature)
    tl.store(dlogits + row * V + columns, grad, mask)


@triton.jit
def _log_softmax_kernel(
    logits, y, V, row_stride, temperature, SCALE: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr
):
    # First and second read as in `_token_kernel`.
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lanes = tl.arange(0, WIDTH)[None, :]
    top = _row_maximum(logits, V, temperature, SCALE, WIDTH)
    lane_sums = tl.zeros((1, WIDTH), tl.float32)
    # Lane sums of e^(z - m).
    for start in range(0, V, WIDTH):
        mask = start + lanes < V
        shifted = _scaled(logits, start + lanes, mask, temperature, SCALE) - top[:, None]
        lane_sums += tl.where(mask, exp(shifted), 0.0)
    # The tree's upper levels; the third read subtracts.
    log_total = log(fold(lane_sums, LOG2))[:, None]
    for start in range(0, V, WIDTH):
        mask = start + lanes < V
        shifted = _scaled(logits, start + lanes, mask, temperature, SCALE) - top[:, None]
        tl.store(y + row * V + start + lanes, shifted - log_total, mask)


@triton.jit
def _log_softmax_backward_kernel(dy, y, dlogits, V, temperature, SCALE: tl.constexpr, WIDTH: tl.constexpr):
    # A program per row. First read: the sum of dy in lanes, then across threads, in an order that only V decides.
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    # Second read: dy - p sum(dy), with p = e^y.
    for start in range(0, V, WIDTH):
        total += tl.load(dy + row * V + start + lanes, start + lanes < V, 0.0)
    incoming = tl.sum(total, 0)
    for start in range(0, V, WIDTH):
        mask = start + lanes < V
        p = exp(tl.load(y + row * V + start + lanes, mask, float("-inf")))
        grad = tl.load(dy + row * V + start + lanes, mask, 0.0) - p * incoming
        if SCALE:
            grad = tl.div_rn(grad, tl.zeros((WIDTH,), tl.float32) + temperature)
        tl.store(dlogits + row * V + start + lanes, grad, mask)


def _launch(v: int, rows: int = 0) -> dict[str, int]:
    """Chunk width of a row of v logits. A row shorter than a chunk folds in its own power of two, as in `lane_sum`.

    Many rows fill the GPU with one warp each, which keeps the tree in registers; few rows need more warps per row.
    """
    width = min(SUM_LANES, max(16, next_power_of_2(v)))
    warps = 1 if rows >= _MANY_ROWS else 8 if width >= 2048 else 4
    return {"WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}


def _log2(launch: dict[str, int]) -> int:
    return launch["WIDTH"].bit_length() - 1


_MANY_ROWS = 1024


@operator("token_logprobs")
def token_logprobs_op(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits fp32 [T, V], ids [T] -> (log p, entropy or [0], log-sum-exp), each fp32 [T]."""
    rows, v = logits.shape
    logp, lse = logits.new_empty(rows), logits.new_empty(rows)
    entropy = logits.new_empty(rows if want_entropy else 0)
    if rows:
        launch = _launch(v, rows)
        _token_kernel[(rows,)](
            logits, ids, logp, entropy, lse, v, logits.stride(0), temperature,
            SCALE=temperature != 1.0, ENTROPY=want_entropy, LOG2=_log2(launch), **launch,
        )  # fmt: skip
    return logp, entropy, lse


@fake(token_logprobs_op)
def _(logits, ids, temperature, want_entropy):
    rows = logits.shape[0]
    return logits.new_empty(rows), logits.new_empty(rows if want_entropy else 0), logits.new_empty(rows)


@operator("token_logprobs_backward")
def token_logprobs_backward_op(
    dlogp: torch.Tensor | None, dentropy: torch.Tensor | None, logits: torch.Tensor, ids: torch.Tensor,
    lse: torch.Tensor, entropy: torch.Tensor | None, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """dlogits fp32 [T, V]."""
    rows, v = logits.shape
    out = torch.empty(rows, v, dtype=torch.float32, device=logits.device)
    if rows:
        launch = _launch(v)
        with_entropy = dentropy is not None and entropy is not None
        _token_backward_kernel[(rows, cdiv(v, launch["WIDTH"]))](
            dlogp if dlogp is not None else lse, dentropy if with_entropy else lse, logits, ids, lse,
            entropy if with_entropy else lse, out, v, logits.stride(0), temperature,
            SCALE=temperature != 1.0, LOGP=dlogp is not None, ENTROPY=with_entropy, **launch,
        )  # fmt: skip
    return out


@fake(token_logprobs_backward_op)
def _(dlogp, dentropy, logits, ids, lse, entropy, temperature):
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@operator("log_softmax")
def log_softmax_op(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 [T, V] -> fp32 [T, V]."""
    rows, v = logits.shape
    y = torch.empty(rows, v, dtype=torch.float32, device=logits.device)
    if rows:
        launch = _launch(v, rows)
        _log_softmax_kernel[(rows,)](
            logits,
            y,
            v,
            logits.stride(0),
            temperature,
            SCALE=temperature != 1.0,
            LOG2=_log2(launch),
            **launch,
        )
    return y


@fake(log_softmax_op)
def _(logits, temperature):
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@operator("log_softmax_backward")
def log_softmax_backward_op(dy: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    """dlogits fp32 [T, V] from dy and y, both contiguous."""
    out = torch.empty_like(y)
    if y.shape[0]:
        _log_softmax_backward_kernel[(y.shape[0],)](
            dy, y, out, y.shape[1], temperature, SCALE=temperature != 1.0, **_launch(y.shape[1])
        )
    return out


@fake(log_softmax_backward_op)
def _(dy, y, temperature):
    return torch.empty_like(y)


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@implements("triton", VERSION)
def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, want_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``reference.logprobs.token_logprobs``: (log p(ids) fp32 [T], entropy fp32 [T] or None, log-sum-exp fp32 [T])."""
    check_logits("token_logprobs", logits, temperature)
    check_ids(logits, ids)
    logp, entropy, lse = token_logprobs_op(
        _contiguous_rows(logits), ids.contiguous(), temperature, want_entropy
    )
    return logp, entropy if want_entropy else None, lse


@implements("triton", VERSION)
def token_logprobs_backward(
    dlogp: torch.Tensor | None, dentropy: torch.Tensor | None, logits: torch.Tensor, ids: torch.Tensor,
    lse: torch.Tensor, entropy: torch.Tensor | None, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """``reference.logprobs.token_logprobs_backward``: dlogits fp32 [T, V]."""
    dlogp = None if dlogp is None else dlogp.contiguous()
    dentropy = None if dentropy is None else dentropy.contiguous()
    return token_logprobs_backward_op(
        dlogp, dentropy, _contiguous_rows(logits), ids.contiguous(), lse, entropy, temperature
    )


@implements("triton", VERSION)
def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """``reference.logprobs.log_softmax``: fp32 [T, V]."""
    check_logits("log_softmax", logits, temperature)
    return log_softmax_op(_contiguous_rows(logits), temperature)


@implements("triton", VERSION)
def log_softmax_backward(dy: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    """``reference.logprobs.log_softmax_backward``, the row sum in another (fixed) order."""
    return log_softmax_backward_op(dy.contiguous(), y.contiguous(), temperature)


__all__ = ["log_softmax", "log_softmax_backward", "token_logprobs", "token_logprobs_backward"]
