"""FSDP2 all-gathers of float8 weights: the hooks that FSDP2 reads from a parameter's shard, as torchao uses them.

FSDP2 looks `fsdp_pre_all_gather` and `fsdp_post_all_gather` up on the local tensor of a sharded parameter. They are
attributes of that plain tensor here, so that the optimizer and checkpoints see master weights and no subclass. Checked
in 2.13; a local tensor is replaced, and loses them, where FSDP2 pads it or pins it for offloading.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

LOW = torch.float8_e4m3fn


class WeightGather:
    """Hooks of one weight: its shard is sent in float8, and the gathered weight is a float8 tensor."""

    def __init__(self, shard: Tensor, kernels: LinearMMConfig) -> None:
        self.shard, self._kernels = shard, kernels
        self.scale: Tensor | None = None
        """Of the whole weight; set before each step."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return (what is sent), (what the gathered weight needs besides)."""
        assert self.scale is not None, "set_scales was not called before the all-gather"
        low: Any = hp_tensor_and_scale_to_float8(self.shard, self.scale, LOW, self._kernels, GemmInputRole.WEIGHT)
        # gloo knows no float8, and FSDP2 sends parameters of several dtypes as bytes anyway.
        return (low._data.view(torch.uint8),), (self.scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], kept: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Return the gathered weight and the memory to free with it; or set the scale of `out`, the previous one."""
        (data,), (scale,) = gathered, kept
        if out is not None:
            whole: Any = out._local_tensor if isinstance(out, DTensor) else out
            whole._scale = scale
            return None
        whole = Float8TrainingTensor(data.view(LOW), scale, dtype, self._kernels, GemmInputRole.WEIGHT)
        return whole, (data,)


def gather_in_float8(layer: nn.Module) -> WeightGather | None:
    """Have FSDP2 gather the weight of `layer` in float8 and return its hooks; None if it would pad the shard."""
    assert isinstance(layer, Float8Linear)
    weight: Any = layer._parameters["weight"]
    shard = weight._local_tensor
    if weight.numel() % shard.numel() or not _is_even(weight):
        return None
    gather = WeightGather(shard, layer.linear_mm_config)
    shard.fsdp_pre_all_gather = gather.fsdp_pre_all_gather
    shard.fsdp_post_all_gather = gather.fsdp_post_all_gather
    return gather


@torch.no_grad()
def largest_magnitudes(gathers: Sequence[WeightGather]) -> Tensor:
    """Return the largest magnitude in each shard."""
    return torch.stack(torch._foreach_norm([gather.shard for gather in gathers], float("inf")))


@torch.no_grad()
def set_scales(gathers: Sequence[WeightGather], amax: Tensor) -> None:
    """Set the scale of each weight from its largest magnitude."""
    for gather, scale in zip(gathers, amax_to_scale(amax, LOW).unbind(), strict=True):
        gather.scale = scale


def _is_even(weight: DTensor) -> bool:
    """Return whether all ranks hold equal shards of `weight`."""
    sizes = weight._local_tensor.shape
    for dim, whole in enumerate(weight.shape):
        degree = 1
        for axis, placement in enumerate(weight.placements):
            degree *= weight.device_mesh.size(axis) if placement.is_shard(dim) or _is_strided(placement, dim) else 1
        if whole != sizes[dim] * degree:
            return False
    return True


def _is_strided(placement: Any, dim: int) -> bool:
    """Return whether a placement is FSDP2's of a dim that tensor parallelism shards too; private."""
    return getattr(placement, "dim", None) == dim and hasattr(placement, "split_factor")
