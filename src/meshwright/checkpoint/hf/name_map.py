"""NameMap: a table of tensor names that defines export and import and accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from meshwright.errors import CheckpointError

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
            problems.append(f"{len(unknown)} unknown: {_some(unknown)}")
        if missing:
            problems.append(f"{len(missing)} missing: {_some(missing)}")
        if problems:
            raise CheckpointError(
                f"the tensors of {source} are not those of its architecture ({'; '.join(problems)}): "
                "make the architecture (config.json, or [model] of the job) match the weights, or take the whole folder"
            )
        return theirs


def _number_in(name: str, pattern: str) -> str | None:
    """Return {i} in `name` ("" if the pattern has none), None if the pattern does not match."""
    expression = re.escape(pattern).replace(r"\{i\}", f"(?P<i>{_NUMBER})").replace(r"\{e\}", _NUMBER)
    match = re.fullmatch(expression, name)
    return None if match is None else match.groupdict().get("i", "")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
