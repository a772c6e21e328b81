"""Functional collectives of torch's that are recorded as others: as what their implementations do on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwright.tracer.record.collectives import group_of

_ops = torch.ops._c10d_functional


def _shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Tensor:
    """Return this rank's part along `shard_dim` of what ranks hold the parts of along `gather_dim`.

    DTensor goes from one sharded dimension to another so. The result is waited for at once.
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
    """Return `x` in the order of its dimensions, a copy if need be: Tensor.contiguous() is recorded as a view here."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _wait_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors when all have arrived."""
    return [_ops.wait_tensor(one) for one in tensors]


def _known() -> dict[OpOverload, Callable[..., Any]]:
    found: dict[OpOverload, Callable[..., Any]] = {torch.ops._dtensor.shard_dim_alltoall.default: _shard_dim_alltoall}
    if hasattr(_ops, "wait_tensors"):
        # Since torch 2.15.
        found[_ops.wait_tensors.default] = _wait_tensors
    return found


PARTS: Mapping[OpOverload, Callable[..., Any]] = _known()
"""By operator what runs its parts."""
