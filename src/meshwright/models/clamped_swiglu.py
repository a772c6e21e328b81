"""SwiGLU of GPT-OSS's experts: (up + 1) x gate x sigmoid(1.702 gate), after gate and up are clamped.

Shapes: R rows, F width inside an expert.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.spec.model.gpt_oss_architecture import SWIGLU_GAIN


def clamped_swiglu(gate_RF: Tensor, up_RF: Tensor, limit: float) -> Tensor:
    """Return the product of gate_RF, at most `limit`, and up_RF, within +-`limit`; backward saves these two only."""
    product_RF: Tensor = _ClampedSwiGLU.apply(gate_RF, up_RF, limit)  # type: ignore[no-untyped-call]
    return product_RF


class _ClampedSwiGLU(torch.autograd.Function):
    # In place where possible: in eager code each of these is as large as all activations of a network.
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        ctx.limit = limit
        clamped_RF = gate_RF.clamp(max=limit)
        gated_RF = (SWIGLU_GAIN * clamped_RF).sigmoid_().mul_(clamped_RF)
        return up_RF.clamp(-limit, limit).add_(1).mul_(gated_RF)

    @staticmethod
    def backward(ctx: Any, gradient_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate_RF, up_RF), limit = ctx.saved_tensors, ctx.limit
        clamped_RF = gate_RF.clamp(max=limit)
        sigmoid_RF = (SWIGLU_GAIN * clamped_RF).sigmoid_()
        up_gradient_RF = (gradient_RF * clamped_RF).mul_(sigmoid_RF).masked_fill_(up_RF.abs() > limit, 0.0)
        # d(c s) = s (1 + gain c (1 - s)) dc, with the sigmoid s of the clamped gate c.
        slope_RF = (1 - sigmoid_RF).mul_(clamped_RF).mul_(SWIGLU_GAIN).add_(1).mul_(sigmoid_RF)
        gate_gradient_RF = up_RF.clamp(-limit, limit).add_(1).mul_(gradient_RF).mul_(slope_RF)
        return gate_gradient_RF.masked_fill_(gate_RF > limit, 0.0), up_gradient_RF, None
