"""Conversion of tensors between our layout and that of a Hugging Face folder, by the rows of a name map."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from meshwright.spec.model.hf.name_map import NameMap, Part, Rename, their_name

PIECE_BYTES = 32 << 20
"""Tensors are converted in pieces of about this size where their rows are independent."""


def to_ours(rename: Rename, theirs: Sequence[Tensor]) -> Tensor:
    """Return our tensor, or the part of it that `rename` is of; `theirs` is one tensor, or one per expert."""
    if rename.is_stacked:
        return torch.stack([_one_to_ours(rename, tensor) for tensor in theirs])
    [tensor] = theirs
    return _one_to_ours(rename, tensor)


def joined(renames: Sequence[Rename], parts: Sequence[Tensor]) -> Tensor:
    """Return our tensor of its parts, each of which `to_ours` made for its row; of one row it is the whole."""
    part = renames[0].our_part
    return parts[0] if part is None else torch.cat([*parts], dim=part.dim + renames[0].is_stacked)


def _one_to_ours(rename: Rename, tensor: Tensor) -> Tensor:
    if rename.part is not None:
        tensor = _part_of(tensor, rename.part)
    if rename.is_transposed:
        tensor = tensor.mT
    if rename.interleaved_heads is not None:
        tensor = _swap_pairs(tensor, (rename.interleaved_heads, -1, 2))
    if rename.our_interleaved_heads is not None:
        tensor = _swap_pairs(tensor, (rename.our_interleaved_heads, 2, -1))
    return tensor.contiguous()


def to_theirs(renames: Sequence[Rename], ours: Sequence[Tensor]) -> Tensor:
    """Return one tensor of theirs, contiguous; `ours` are its parts by index, or a single tensor (of one expert)."""
    laid_out = []
    for rename, tensor in zip(renames, ours, strict=True):
        if rename.our_part is not None:
            start, end = rename.our_part.range_of(tensor.shape[rename.our_part.dim])
            tensor = tensor.narrow(rename.our_part.dim, start, end - start)
        if rename.interleaved_heads is not None:
            tensor = _swap_pairs(tensor, (rename.interleaved_heads, 2, -1))
        if rename.our_interleaved_heads is not None:
            tensor = _swap_pairs(tensor, (rename.our_interleaved_heads, -1, 2))
        laid_out.append(tensor.mT if rename.is_transposed else tensor)
    part = renames[0].part
    if part is None:
        return laid_out[0].contiguous()
    if part.is_interleaved:
        return torch.stack(laid_out, dim=part.dim + 1).flatten(part.dim, part.dim + 1)
    return torch.cat(laid_out, dim=part.dim)


def written_together(names: NameMap, ours: Collection[str]) -> dict[str, list[tuple[str, Rename]]]:
    """Return by name of theirs, with {e} for experts, our tensors that make it up, each with its row, in order."""
    groups: dict[str, list[tuple[str, Rename]]] = {}
    for name in ours:
        for rename in names.rows_of(name):
            groups.setdefault(their_name(rename, name), []).append((name, rename))
    return {theirs: sorted(group, key=_part_index) for theirs, group in groups.items()}


def row_ranges(rename: Rename, shape: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Return ranges of dim 0 of ours that can be converted one after the other, of about PIECE_BYTES each."""
    num_rows = shape[0] if shape else 1
    if not rename.keeps_rows or not shape:
        return [(0, num_rows)]
    at_once = max(1, PIECE_BYTES // max(1, prod(shape[1:]) * itemsize))
    return [(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)]


def share_of(sizes: Sequence[int], rank: int, num_ranks: int) -> range:
    """Return the indices of the pieces of `sizes` that `rank` converts: neighbours, of about an equal sum."""
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    first, end = (bisect_left(starts, total * r / num_ranks, hi=len(sizes)) for r in (rank, rank + 1))
    return range(first, len(sizes) if rank == num_ranks - 1 else end)


def _part_index(named: tuple[str, Rename]) -> int:
    part = named[1].part
    return 0 if part is None else part.index


def _part_of(tensor: Tensor, part: Part) -> Tensor:
    if part.is_interleaved:
        every: Tensor = tensor.unflatten(part.dim, (-1, len(part.shares))).select(part.dim + 1, part.index)
        return every
    start, end = part.range_of(tensor.shape[part.dim])
    return tensor.narrow(part.dim, start, end - start)


def _swap_pairs(tensor: Tensor, pairs: tuple[int, int, int]) -> Tensor:
    """Return `tensor` with the rows of each head, a matrix of `pairs[1:]`, transposed."""
    return tensor.view(*pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
