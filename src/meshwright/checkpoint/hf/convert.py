"""Layout conversion of tensors between Hugging Face folders and our models, by the rows of a NameMap."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.hf.name_map import NameMap, Rename


def to_ours(rename: Rename, theirs: Sequence[Tensor]) -> Tensor:
    """Return our tensor, contiguous; `theirs` is one tensor, or one per expert."""
    if rename.is_stacked:
        return torch.stack(list(theirs))
    [tensor] = theirs
    if rename.part is not None:
        index, number = rename.part
        tensor = tensor.chunk(number, dim=-1)[index]
    return (tensor.T if rename.is_transposed else tensor).contiguous()


def to_theirs(names: NameMap, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return their tensors, contiguous, by name; `ours` holds all parts of each (`written_together`)."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in ours.items():
        rename, theirs = names.rename_of(name), names.theirs(name, tensor.shape)
        if rename.is_stacked:
            whole |= zip(theirs, tensor.unbind(), strict=True)
            continue
        laid_out = tensor.T if rename.is_transposed else tensor
        if rename.part is None:
            whole[theirs[0]] = laid_out.contiguous()
        else:
            parts.setdefault(theirs[0], {})[rename.part[0]] = laid_out
    joined = {name: torch.cat([of[index] for index in sorted(of)], dim=-1) for name, of in parts.items()}
    return {**whole, **joined}


def their_shape(rename: Rename, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of each of their tensors that make up one of ours, of `shape`."""
    if rename.is_stacked:
        return tuple(shape[1:])
    *others, last = reversed(shape) if rename.is_transposed else shape
    return (*others, last * (1 if rename.part is None else rename.part[1]))


def written_together(names: NameMap, ours: Collection[str]) -> list[list[str]]:
    """Return our names in order, grouped by the tensor of theirs that they are parts of."""
    groups: dict[str, list[str]] = {}
    for name in ours:
        rename = names.rename_of(name)
        groups.setdefault(name if rename.part is None else names.theirs(name)[0], []).append(name)
    return list(groups.values())
