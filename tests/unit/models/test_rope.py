"""Rotary positions are computed in float32 or wider, whatever the dtype of what they turn."""

from __future__ import annotations

import torch

from meshwright.models.attention import rotate, turns


def test_bfloat16_is_turned_in_float32_and_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x_BSNH = torch.randn(2, 64, 4, 16, generator=generator).bfloat16()
    cos_SH, sin_SH = turns(1e4 ** -torch.linspace(0, 1, 8), torch.arange(4096, 4096 + 64))
    exact = rotate(x_BSNH.double(), cos_SH.double(), sin_SH.double())
    # One rounding to eight bits; what float32 loses where two terms cancel is far smaller.
    torch.testing.assert_close(rotate(x_BSNH, cos_SH, sin_SH).double(), exact, rtol=2**-8, atol=1e-6)
