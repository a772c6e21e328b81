"""MXFP8 linear layers: a power-of-two scale for each 32 elements along which a matmul sums, all in e4m3.

    output = x w^T    gradient of x = g w    gradient of w = g^T x

Format: OCP Microscaling Formats 1.0; scales rounded up, as NVIDIA's recipe for training does (arXiv:2506.08027).
A block lies on one rank, so that ranks exchange no amax and a layout changes no scale. Each operand is rounded once for
each matmul, along what it sums over. Backward computes only what the current backward pass asks for, and x is saved as
it was given, as in float8_linear.py.

Shapes: T tokens, I input features, O output features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallelism.torch_private.torch_scaled_matmul import block_scaled_matmul, to_block_scaled
from meshwright.parallelism.torch_private.torch_split_backward import is_needed


class MXFP8Linear(nn.Linear):
    """A linear layer whose three matmuls are in MXFP8."""

    emulates = False
    """Whether products of rounded operands are computed in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output in the input's dtype."""
        # A view: a leaf could not be asked whether its gradient is needed (is_needed).
        output: Tensor = _MXMatmul.apply(input, self.weight.t(), self.emulates)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output


@torch._dynamo.allow_in_graph
class _MXMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_IO: Tensor, emulates: bool) -> Tensor:
        ctx.save_for_backward(x, weight_IO)
        ctx.emulates = emulates
        output_TO = _product(x.flatten(0, -2), weight_IO.t(), ctx)
        output: Tensor = output_TO.unflatten(0, x.shape[:-1])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Read once: hooks of saved tensors recompute or all-gather.
        x, weight_IO = ctx.saved_tensors
        gradient_TO = gradient.flatten(0, -2)
        of_x, of_weight = None, None
        if is_needed(ctx, 0):
            of_x = _product(gradient_TO, weight_IO, ctx).unflatten(0, gradient.shape[:-1])
        if is_needed(ctx, 1):
            of_weight = _product(x.flatten(0, -2).t(), gradient_TO.t(), ctx)
        return of_x, of_weight, None


def _product(left_TI: Tensor, right_OI: Tensor, ctx: Any) -> Tensor:
    """Return left_TI x right_OI^T of operands rounded along I, in the dtype of the left one."""
    low = to_block_scaled(left_TI), to_block_scaled(right_OI)
    return block_scaled_matmul(*low, left_TI.dtype, emulates=ctx.emulates)
