"""A global batch from the rank that reads it to all ranks, as plain bytes: nothing is unpickled."""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist


class StreamBatch(NamedTuple):
    """The samples of a global batch, in the order of slots, and the position of their stream after them."""

    inputs: Tensor
    targets: Tensor
    position: dict[str, Any]


def reads_stream() -> bool:
    """Return whether this rank reads streams: rank 0, the first of data parallelism."""
    return not dist.is_initialized() or dist.get_rank() == 0


def broadcast_batch(batch: StreamBatch | None) -> StreamBatch:
    """Return the batch of the rank that reads, which gives it, on every rank; a collective of the CPU's backend."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch
    if batch is not None:
        header = json.dumps([_kind(batch.inputs), _kind(batch.targets), batch.position]).encode()
        _broadcast(torch.tensor([len(header)]))
        _broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in (batch.inputs, batch.targets):
            _broadcast(_bytes_of(tensor))
        return batch
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length)
    received = torch.empty(int(length), dtype=torch.uint8)
    _broadcast(received)
    *kinds, position = json.loads(received.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
    for tensor in tensors:
        _broadcast(_bytes_of(tensor))
    return StreamBatch(tensors[0], tensors[1], position)


def _broadcast(tensor: Tensor) -> None:
    dist.broadcast(tensor, src=0)


def _kind(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)
