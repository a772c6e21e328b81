"""One hash over all parameters, whatever their sharding: rank 0 assembles one tensor at a time.

Ranks may hold different names (pipeline stages) on different meshes (experts and the rest), which no DTensor collective
spans. So each rank lists the boxes that it holds, and rank 0 requests each box from one rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box


def parameter_hash(model: nn.Module) -> str:
    """Return xxh3-128 over name, shape, dtype and bytes of every parameter in name order; a collective.

    Rank 0 returns the hash, other ranks "".
    """
    digest = xxhash.xxh3_128()
    for name, whole in whole_tensors(canonical_parameters(model)):
        digest.update(f"{name} {tuple(whole.shape)} {whole.dtype}".encode())
        digest.update(whole.view(-1).view(torch.uint8).numpy().data)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return digest.hexdigest() if is_first else ""


class _Box(NamedTuple):
    """A rank's shard of one tensor, as an index range in each dim."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor on the CPU) in the order of names, on rank 0; the other ranks get none.

    A collective: every rank must exhaust it. Replicas are yielded once.
    """
    parts = {
        box: part
        for name, tensor in named
        for box, part in [_box_of(name, tensor)]
        if part.numel() or not tensor.numel()
    }
    if not dist.is_initialized():
        yield from _assembled([list(parts)], parts)
        return
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    held: list[list[_Box]] | None = [[] for _ in range(num_ranks)] if rank == 0 else None
    dist.gather_object(list(parts), held, dst=0)
    requested = None if held is None else _requests(held)
    to_send: list[list[_Box]] = [[]]
    dist.scatter_object_list(to_send, requested, src=0)
    if requested is not None:
        yield from _assembled(requested, parts)
        return
    for box in to_send[0]:
        dist.send(_bytes_of(parts[box]), dst=0)


def _box_of(name: str, tensor: Tensor) -> tuple[_Box, Tensor]:
    part, offsets = local_box(tensor.detach())
    return _Box(name, tuple(tensor.shape), tensor.dtype, tuple(offsets), tuple(part.shape)), part


def _requests(held: list[list[_Box]]) -> list[list[_Box]]:
    """Return the boxes that each rank sends, by name; the first rank that holds a box sends it."""
    seen: set[_Box] = set()
    requested = []
    for boxes in held:
        requested.append(sorted((box for box in boxes if box not in seen), key=lambda box: (box.name, box.offsets)))
        seen.update(boxes)
    return requested


def _assembled(requested: list[list[_Box]], own: dict[_Box, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor on rank 0, from its own boxes and those it receives, in the order of names."""
    by_name: dict[str, list[tuple[int, _Box]]] = {}
    for rank, boxes in enumerate(requested):
        for box in boxes:
            by_name.setdefault(box.name, []).append((rank, box))
    for name, boxes_of_name in sorted(by_name.items()):
        first = boxes_of_name[0][1]
        whole = torch.empty(first.shape, dtype=first.dtype)
        num_filled = 0
        for rank, box in boxes_of_name:
            part = own[box].cpu() if rank == 0 else _received(rank, box)
            whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))] = part
            num_filled += part.numel()
        assert num_filled == whole.numel(), f"the parts of {name} hold {num_filled} of {whole.numel()} elements"
        yield name, whole


def _received(rank: int, box: _Box) -> Tensor:
    part = torch.empty(box.sizes, dtype=box.dtype)
    dist.recv(part.view(-1).view(torch.uint8), src=rank)
    return part


def _bytes_of(part: Tensor) -> Tensor:
    return part.cpu().contiguous().view(-1).view(torch.uint8)
