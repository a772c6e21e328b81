"""Operators that are recorded as several: as their implementations on a device.

Functional collectives of DTensor, and grouped matmuls of dtypes without a CUDA kernel, all but bfloat16
(aten/src/ATen/native/GroupedMMUtils.h): torch's fake implementation refuses these, while CUDA reads the group
offsets and multiplies one group after another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwright.tracer.record.collective_ops import group_of
from meshwright.tracer.torch_patches.torch_names import WAITS_FOR_SEVERAL

_ops = torch.ops._c10d_functional


def _shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Tensor:
    """Return the local shard along `shard_dim` of a tensor sharded along `gather_dim`, as DTensor redistributes it.

    The wait follows at once.
    """
    process_group = group_of(group)
    assert process_group is not None
    num_ranks = process_group.size()
    sizes, shape = list(x.shape), list(x.shape)
    sizes[shard_dim : shard_dim + 1] = [num_ranks, shape[shard_dim] // num_ranks]
    sent = _contiguous(x.reshape(sizes).movedim(shard_dim, 0))
    arrived = _ops.wait_tensor(_ops.all_to_all_single(sent, [1] * num_ranks, [1] * num_ranks, group))
    shape[shard_dim] //= num_ranks
    shape[gather_dim] *= num_ranks
    return _contiguous(arrived.movedim(0, gather_dim)).view(shape)


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous `x`, copied if necessary: Tensor.contiguous() would be recorded as a view."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _wait_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors when all have arrived."""
    return [_ops.wait_tensor(one) for one in tensors]


PARTS: Mapping[OpOverload, Callable[..., Any]] = {
    torch.ops._dtensor.shard_dim_alltoall.default: _shard_dim_alltoall,
    **dict.fromkeys(WAITS_FOR_SEVERAL, _wait_tensors),
}
"""By operator the function that runs its parts."""


GROUPED_MATMUL = torch.ops.aten._grouped_mm.default
_MATRIX = 2


def is_by_loop(first: Tensor) -> bool:
    """Return whether CUDA multiplies the groups of a grouped matmul one by one."""
    return first.dtype in (torch.float32, torch.float16)


def run_by_loop(first: Tensor, second: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the products of all groups, assuming equal numbers of rows."""
    if ends is None:
        return torch.bmm(first, second)
    torch.ops.aten._to_copy.default(ends, device=torch.device("cpu"))
    count, is_sum = len(ends), first.dim() == second.dim() == _MATRIX
    size = (first.shape[-2], second.shape[-1])
    result = first.new_empty((count, *size) if is_sum else size)
    for group in range(count):
        lefts = first.tensor_split(count, dim=1 if is_sum else 0)[group] if first.dim() == _MATRIX else first[group]
        rights = second.tensor_split(count, dim=0 if is_sum else 1)[group] if second.dim() == _MATRIX else second[group]
        parts = result if is_sum else result.tensor_split(count, dim=0 if first.dim() == _MATRIX else 1)
        torch.mm(lefts, rights, out=parts[group])
    return result
