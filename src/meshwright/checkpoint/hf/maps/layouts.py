"""Conversion of tensors between our layout and that of a Hugging Face folder, by the rows of a name map."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from meshwright.checkpoint.hf.maps.name_map import NameMap, Rename

PIECE_BYTES = 32 << 20
"""Tensors are converted in pieces of about this size where their rows are independent."""


def to_ours(rename: Rename, theirs: Sequence[Tensor]) -> Tensor:
    """Return our tensor, contiguous; `theirs` is one tensor, or one per expert."""
    if rename.is_stacked:
        one = replace(rename, theirs="")
        return torch.stack([to_ours(one, [tensor]) for tensor in theirs])
    [tensor] = theirs
    if rename.part is not None:
        start, end = rename.part.range_of(tensor.shape[rename.part.dim])
        tensor = tensor.narrow(rename.part.dim, start, end - start)
    if rename.is_transposed:
        tensor = tensor.T
    if rename.interleaved_heads is not None:
        tensor = _swap_pairs(tensor, (rename.interleaved_heads, -1, 2))
    return tensor.contiguous()


def to_theirs(renames: Sequence[Rename], ours: Sequence[Tensor]) -> Tensor:
    """Return one tensor of theirs, contiguous; `ours` are its parts by index, or a single tensor (of one expert)."""
    laid_out = []
    for rename, tensor in zip(renames, ours, strict=True):
        if rename.interleaved_heads is not None:
            tensor = _swap_pairs(tensor, (rename.interleaved_heads, 2, -1))
        laid_out.append(tensor.T if rename.is_transposed else tensor)
    part = renames[0].part
    return (laid_out[0] if part is None else torch.cat(laid_out, dim=part.dim)).contiguous()


def their_shape(rename: Rename, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of each of their tensors that make up one of ours, of `shape`."""
    sizes = list(shape[1:] if rename.is_stacked else shape)
    if rename.is_transposed:
        sizes.reverse()
    if rename.part is not None:
        sizes[rename.part.dim] = rename.part.fused_size(sizes[rename.part.dim])
    return tuple(sizes)


def written_together(names: NameMap, ours: Collection[str]) -> list[list[str]]:
    """Return our names in order, grouped by the tensor of theirs that they are parts of, in the order of the parts."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in ours:
        part = names.rename_of(name).part
        key, index = (name, 0) if part is None else (names.theirs(name)[0], part.index)
        groups.setdefault(key, []).append((index, name))
    return [[name for _, name in sorted(group)] for group in groups.values()]


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


def _swap_pairs(tensor: Tensor, pairs: tuple[int, int, int]) -> Tensor:
    """Return `tensor` with the rows of each head, a matrix of `pairs[1:]`, transposed."""
    return tensor.view(*pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
