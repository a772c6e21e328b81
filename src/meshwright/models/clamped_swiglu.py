"""SwiGLU of GPT-OSS's experts: (up + 1) x gate x sigmoid(1.702 gate), after gate and up are clamped.

Shapes: R rows, F width inside an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.spec.model.gpt_oss_architecture import SWIGLU_GAIN


def clamped_swiglu(gate_RF: Tensor, up_RF: Tensor, limit: float) -> Tensor:
    """Return the product of gate_RF, at most `limit`, and up_RF, within +-`limit`; backward saves these two only."""
    product_RF: Tensor = _ClampedSwiGLU.apply(gate_RF, up_RF, limit)  # type: ignore[no-untyped-call]
    return product_RF


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        ctx.limit = limit
        gate_RF = gate_RF.clamp(max=limit)
        return (up_RF.clamp(-limit, limit) + 1) * (gate_RF * torch.sigmoid(SWIGLU_GAIN * gate_RF))

    @staticmethod
    def backward(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate_RF, up_RF), limit = ctx.saved_tensors, ctx.limit
        clamped_RF = gate_RF.clamp(max=limit)
        sigmoid_RF = torch.sigmoid(SWIGLU_GAIN * clamped_RF)
        slope_RF = sigmoid_RF * (1 + SWIGLU_GAIN * clamped_RF * (1 - sigmoid_RF))
        gate_gradient_RF = gradient_RF * (up_RF.clamp(-limit, limit) + 1) * slope_RF * (gate_RF <= limit)
        return gate_gradient_RF, gradient_RF * clamped_RF * sigmoid_RF * (up_RF.abs() <= limit), None
