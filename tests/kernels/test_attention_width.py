"""Heads are padded to widths at which FlashAttention-3 has one tile of keys; padding changes no number."""

from __future__ import annotations

import pytest
import torch

from precision_kernels.hopper.attention_width import attention_width, widen_heads
from precision_kernels.reference import AttentionLayout, attention
from tests.edge_cases import assert_same_bits, normal


@pytest.mark.parametrize("dim", [1, 64, 80, 96, 97, 128, 129, 192, 193, 256])
def test_widths_are_those_with_one_tile(dim: int) -> None:
    """Every head gets a width of (96, 128] or (192, 256], the rows of FA3's table whose three tiles are equal."""
    width = attention_width(dim)
    assert width >= dim
    assert 96 < width <= 128 or 192 < width <= 256
    assert attention_width(width) == width


def test_zeros_behind_heads_change_no_bit() -> None:
    """In the definition, attention of padded heads at the old scale is attention, with zeros behind."""
    heads = [normal(40, h * 64, seed).to(torch.bfloat16).view(40, h, 64) for seed, h in enumerate((4, 2, 2))]
    layout = AttentionLayout(torch.tensor([0, 3, 40]))
    expected, lse = attention(*heads, layout)
    wide, wide_lse = attention(*(widen_heads(x, 128) for x in heads), layout, scale=64**-0.5)
    assert_same_bits(wide[..., :64].contiguous(), expected, "output")
    assert_same_bits(wide_lse, lse, "log-sum-exp")
    assert not wide[..., 64:].any()
    assert widen_heads(heads[0], 64) is heads[0]
