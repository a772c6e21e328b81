"""whole_tensors: sharded tensors put together on rank 0, one at a time, wherever their parts lie.

Ranks may hold different names (stages of a pipeline) on different meshes (experts and the rest), which no collective of
DTensor spans. So each rank says which boxes it holds, and rank 0 asks for each box once, from one rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_compat import local_box


class _Box(NamedTuple):
    """A rank's part of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor on the CPU) in the order of names, on rank 0; the other ranks get none.

    A collective over all ranks: exhaust it on each. A name that a rank or several hold more than once is yielded once.
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
    asked = None if held is None else _asked(held)
    answer: list[list[_Box]] = [[]]
    dist.scatter_object_list(answer, asked, src=0)
    if asked is not None:
        yield from _assembled(asked, parts)
        return
    for box in answer[0]:
        dist.send(_bytes_of(parts[box]), dst=0)


def _box_of(name: str, tensor: Tensor) -> tuple[_Box, Tensor]:
    part, offsets = local_box(tensor.detach())
    return _Box(name, tuple(tensor.shape), tensor.dtype, tuple(offsets), tuple(part.shape)), part


def _asked(held: list[list[_Box]]) -> list[list[_Box]]:
    """Return for each rank the boxes that it shall send, by name: of several ranks with the same, the first."""
    seen: set[_Box] = set()
    asked = []
    for boxes in held:
        asked.append(sorted((box for box in boxes if box not in seen), key=lambda box: (box.name, box.offsets)))
        seen.update(boxes)
    return asked


def _assembled(asked: list[list[_Box]], own: dict[_Box, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor on rank 0: its own parts, and what other ranks send in the order of names."""
    by_name: dict[str, list[tuple[int, _Box]]] = {}
    for rank, boxes in enumerate(asked):
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
