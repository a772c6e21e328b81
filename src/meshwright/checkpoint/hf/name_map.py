"""NameMap: a table of tensor names and layouts that defines export and import, and accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.units import first_of

_NUM_NAMED = 6
_NUMBER = "(0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Rename:
    """One tensor under two names; {i} is the same layer number in both.

    {e} in theirs is the number of an expert: our tensor stacks theirs of all experts along dim 0.
    """

    ours: str
    theirs: str
    is_transposed: bool = False
    """Whether theirs is the transposed matrix."""
    part: tuple[int, int] | None = None
    """(index, number): ours is one of `number` equal parts of theirs along its last dim."""

    @property
    def is_stacked(self) -> bool:
        """Return whether ours stacks several of theirs."""
        return "{e}" in self.theirs


@dataclass(frozen=True)
class Drop:
    """A redundant tensor of theirs, which is ignored by name."""

    theirs: str
    reason: str


@dataclass(frozen=True)
class NameMap:
    """Names and layouts of one model family's tensors in both formats."""

    renames: tuple[Rename, ...]
    drops: tuple[Drop, ...] = ()
    prefix: str = ""
    """Prefix of their names in folders of the whole model; folders without a head lack it."""

    def spelled_as(self, present: Collection[str]) -> NameMap:
        """Return the table for a folder with these names: without the prefix if no name has it."""
        if not self.prefix or any(name.startswith(self.prefix) for name in present):
            return self
        return NameMap(
            tuple(replace(rename, theirs=rename.theirs.removeprefix(self.prefix)) for rename in self.renames),
            tuple(replace(drop, theirs=drop.theirs.removeprefix(self.prefix)) for drop in self.drops),
        )

    def rename_of(self, ours: str) -> Rename:
        """Return the row of one of our tensors; raises CheckpointError for an unknown one."""
        for rename in self.renames:
            if _number_in(ours, rename.ours) is not None:
                return rename
        raise CheckpointError(
            f"the parameter {ours} has no Hugging Face name: the model is not of the family of this name map"
        )

    def theirs(self, ours: str, shape: Collection[int] = ()) -> list[str]:
        """Return their names of one of our tensors: one, or one for each of shape[0] experts."""
        rename = self.rename_of(ours)
        name = rename.theirs.replace("{i}", _number_in(ours, rename.ours) or "")
        num_experts = next(iter(shape), 0)
        return [name.replace("{e}", str(e)) for e in range(num_experts)] if rename.is_stacked else [name]

    def ours(self, theirs: str) -> str | None:
        """Return our name of one of their tensors, None if unknown."""
        for rename in self.renames:
            if (number := _number_in(theirs, rename.theirs)) is not None:
                return rename.ours.replace("{i}", number)
        return None

    def is_dropped(self, theirs: str) -> bool:
        """Return whether this tensor is ignored."""
        return any(_number_in(theirs, drop.theirs) is not None for drop in self.drops)

    def account(
        self, present: Collection[str], expected: Mapping[str, Collection[int]], source: str
    ) -> dict[str, list[str]]:
        """Return their names of each of our tensors; `present` must be exactly these and ignored ones.

        `expected` are our shapes by name. Raises CheckpointError that lists unknown and missing keys of `source`.
        """
        theirs = {name: self.theirs(name, shape) for name, shape in expected.items()}
        known = {part for parts in theirs.values() for part in parts}
        unknown = sorted(name for name in set(present) - known if not self.is_dropped(name))
        missing = sorted(known - set(present))
        problems = []
        if unknown:
            problems.append(f"{len(unknown)} unknown: {first_of(unknown, _NUM_NAMED)}")
        if missing:
            problems.append(f"{len(missing)} missing: {first_of(missing, _NUM_NAMED)}")
        if problems:
            raise CheckpointError(
                f"the tensors of {source} are not those of its architecture ({'; '.join(problems)}): "
                "make the architecture (config.json, or [model] of the job) match the weights, or take the whole folder"
            )
        return theirs


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


def _number_in(name: str, pattern: str) -> str | None:
    """Return {i} in `name` ("" if the pattern has none), None if the pattern does not match."""
    expression = re.escape(pattern).replace(r"\{i\}", f"(?P<i>{_NUMBER})").replace(r"\{e\}", _NUMBER)
    match = re.fullmatch(expression, name)
    return None if match is None else match.groupdict().get("i", "")
