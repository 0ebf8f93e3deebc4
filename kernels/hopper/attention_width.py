"""At which head width FlashAttention-3 gives a query row the same bits in every kind of call.

FA3 walks a row's keys in tiles, and rounds after each: other tile widths are other bits. It chooses the width by head
dimension, by whether keys are paged, and for calls with one query per sequence by whether it takes them as causal
(hopper/tile_size.h and flash_api.cpp, "special case of hdim 128"):

    head dimension   packed, causal   paged, causal   paged, one query each
    to 64                       128             128                     160
    65 to 96                    144             128                     128
    97 to 128                   128             128                     128
    129 to 192           128 or 112              96                      96
    193 to 256                   80              80                      80

So a head of 64 in decode differs from the learner's packed forward as soon as there are more keys than one tile holds
(seen on an H200 with vLLM 0.26, 2026-11-29). Heads padded with zeros to a width of 128 or 256 do not: zeros add nothing
to a product, and columns of values do not meet.
"""

from __future__ import annotations

import torch


def attention_width(head_dim: int) -> int:
    """Head dimension at which attention is to be called, >= head_dim."""
    if head_dim <= 96:
        return 128
    return 256 if 128 < head_dim <= 192 else head_dim


def widen_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """[..., D] -> [..., width], with zeros behind; x itself if it is that wide."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
