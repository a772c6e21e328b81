"""Float8 linear layers: torchao's Float8Linear, with scales that no layout changes.

    output = x w^T    gradient of x = g w    gradient of w = g^T x        operands rounded to scale x operand in 8 bits

    tensorwise             one scale for a tensor: x and w in e4m3, g in e5m2
    rowwise                a scale for each row or column along which the matmul sums; all in e4m3, scales powers of two
    rowwise_with_gw_hp     rowwise, but the gradient of w is not in float8, and w of the second matmul has one scale

A scale is the largest value of the format over the largest magnitude (amax) of what it scales. Where ranks hold shards
of that (tp, cp), amax is reduced over them: 4 bytes for a tensor or a row. So a scale depends on the microbatch only.

Backward computes only what the current backward pass asks for, so that a split backward (zero bubble) repeats no
matmul. x is saved as it was given: layers with the same input, and tensor parallelism, save it once or as a shard.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale

from meshwright.parallelism.collectives import all_reduce_max
from meshwright.parallelism.torch_private.torch_compat import process_group
from meshwright.parallelism.torch_private.torch_split_backward import is_needed

GroupNames = tuple[str, ...]
"""Names of process groups: a compiled block takes constants."""
ShardGroups = tuple[GroupNames, GroupNames, GroupNames]
"""Groups whose ranks hold shards along the tokens, the input features and the output features of a layer."""


class LayoutFreeFloat8Linear(Float8Linear):  # type: ignore[misc]
    """Float8Linear whose scales are of whole tensors, whatever ranks hold of them."""

    shard_groups: ShardGroups = ((), (), ())

    @property
    def scales_whole_weight(self) -> bool:
        """Return whether the weight has one scale for both matmuls that read it."""
        return self.config.cast_config_weight.scaling_granularity is ScalingGranularity.TENSORWISE

    def forward(self, input: Tensor) -> Tensor:
        """Return the output in the input's dtype."""
        output: Tensor = _Float8Matmul.apply(  # type: ignore[no-untyped-call]
            input, self.weight.t(), self.linear_mm_config, self.config, self.shard_groups
        )
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output


@torch._dynamo.allow_in_graph
class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_t: Tensor, kernels: LinearMMConfig, config: Float8LinearConfig, groups: ShardGroups
    ) -> Tensor:
        cast = _Caster(kernels, config.round_scales_to_power_of_2)
        tokens, inputs, outputs = groups
        x_TI = x.flatten(0, -2)
        low_TI = cast(x_TI, config.cast_config_input, GemmInputRole.INPUT, -1, (tokens, inputs))
        low_IO = cast(weight_t, config.cast_config_weight, GemmInputRole.WEIGHT, 0, (inputs, outputs))
        ctx.save_for_backward(x, weight_t, *(_scale_to_keep(low) for low in (low_TI, low_IO)))
        ctx.cast, ctx.config, ctx.groups = cast, config, groups
        output: Tensor = torch.mm(low_TI, low_IO).unflatten(0, x.shape[:-1])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # Read once: hooks of saved tensors recompute or all-gather.
        x, weight_t, *scales = ctx.saved_tensors
        gradient_TO = gradient.flatten(0, -2)
        low_TO, of_x, of_weight = None, None, None
        if is_needed(ctx, 0):
            low_TO = _low_gradient(ctx, gradient_TO, -1)
            of_x = _gradient_of_x(ctx, low_TO, weight_t, scales[1]).unflatten(0, gradient.shape[:-1])
        if is_needed(ctx, 1):
            # One scale of the whole tensor suits both matmuls.
            is_same = low_TO is not None and scales[0] is not None
            low_TO = low_TO if is_same else _low_gradient(ctx, gradient_TO, 0)
            assert low_TO is not None
            of_weight = _gradient_of_weight(ctx, low_TO, x, scales[0])
        return of_x, of_weight, None, None, None


def _low_gradient(ctx: Any, gradient_TO: Tensor, axis: int) -> Tensor:
    """Return the output's gradient for the matmul that sums over its dim `axis`."""
    (tokens, _, outputs), config = ctx.groups, ctx.config
    wanted = config.cast_config_grad_output if axis else config.cast_config_grad_output_for_grad_weight
    low: Tensor = ctx.cast(gradient_TO, wanted, GemmInputRole.GRAD_OUTPUT, axis, (tokens, outputs))
    return low


def _gradient_of_x(ctx: Any, low_TO: Tensor, weight_t: Tensor, scale: Tensor | None) -> Tensor:
    (_, inputs, outputs), wanted = ctx.groups, ctx.config.cast_config_weight_for_grad_input
    low_IO = ctx.cast(weight_t, wanted, GemmInputRole.WEIGHT, -1, (inputs, outputs), scale)
    return torch.mm(low_TO, low_IO.t())


def _gradient_of_weight(ctx: Any, low_TO: Tensor, x: Tensor, scale: Tensor | None) -> Tensor:
    (tokens, inputs, _), wanted = ctx.groups, ctx.config.cast_config_input_for_grad_weight
    low_TI = ctx.cast(x.flatten(0, -2), wanted, GemmInputRole.INPUT, 0, (tokens, inputs), scale)
    return torch.mm(low_TO.t(), low_TI).t()


class _Caster:
    """Callable: an operand in float8; itself if it is already, or if the recipe leaves it as it is."""

    def __init__(self, kernels: LinearMMConfig, rounds_scales: bool) -> None:
        self._kernels, self._rounds_scales = kernels, rounds_scales

    def __call__(
        self,
        operand: Tensor,
        wanted: CastConfig,
        role: GemmInputRole,
        axis: int,
        groups: tuple[GroupNames, GroupNames],
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return it; `axis` (0 or -1) is the dim that the matmul sums over, `scale` one that is known if it has one."""
        if wanted.scaling_type is ScalingType.DISABLED or tensor_already_casted_to_fp8(operand):
            return operand
        by_row = wanted.scaling_granularity is ScalingGranularity.AXISWISE
        if by_row or scale is None:
            # One kernel where abs and amax are two.
            amax = torch.linalg.vector_norm(operand, math.inf, axis if by_row else None, keepdim=by_row)
            for name in groups[axis] if by_row else (*groups[0], *groups[1]):
                amax = all_reduce_max(amax, process_group(name))
            scale = amax_to_scale(amax, wanted.target_dtype, self._rounds_scales)
        low: Tensor = hp_tensor_and_scale_to_float8(
            operand, scale, wanted.target_dtype, self._kernels, role, axis if by_row else None
        )
        return low


def _scale_to_keep(low: Tensor) -> Tensor | None:
    """Return the scale of a whole tensor: those of rows are of the other dim in backward."""
    scale = getattr(low, "_scale", None)
    return scale if scale is not None and scale.dim() == 0 else None
