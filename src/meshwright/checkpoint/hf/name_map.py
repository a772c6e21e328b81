"""NameMap: one table of names from which both directions of a conversion follow, and which accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.errors import CheckpointError

_NUM_NAMED = 6
_NUMBER = "(0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Rename:
    """One tensor under two names; {i} stands for the same number in both.

    {e} in theirs stands for every expert: their tensors of all experts are ours, stacked along its first dim.
    """

    ours: str
    theirs: str

    @property
    def is_stacked(self) -> bool:
        """Return whether ours is made of several of theirs."""
        return "{e}" in self.theirs


@dataclass(frozen=True)
class Drop:
    """A tensor of theirs that carries nothing: it is left out by name, and never because it is unknown."""

    theirs: str
    reason: str


@dataclass(frozen=True)
class NameMap:
    """How the tensors of one model family are called here and there."""

    renames: tuple[Rename, ...]
    drops: tuple[Drop, ...] = ()

    def theirs(self, ours: str, shape: Collection[int] = ()) -> list[str]:
        """Return their names of one of our tensors: one, or one for each expert, of which shape[0] is the number."""
        for rename in self.renames:
            if (number := _number_in(ours, rename.ours)) is not None:
                name = rename.theirs.replace("{i}", number)
                num_experts = next(iter(shape), 0)
                return [name.replace("{e}", str(e)) for e in range(num_experts)] if rename.is_stacked else [name]
        raise CheckpointError(
            f"the parameter {ours} has no Hugging Face name: the model is not of the family of this name map"
        )

    def ours(self, theirs: str) -> str | None:
        """Return our name of one of their tensors, None for one that the table does not know."""
        for rename in self.renames:
            if (number := _number_in(theirs, rename.theirs)) is not None:
                return rename.ours.replace("{i}", number)
        return None

    def is_stacked(self, ours: str) -> bool:
        """Return whether our tensor is made of several of theirs, even where it is of one."""
        return any(rename.is_stacked and _number_in(ours, rename.ours) is not None for rename in self.renames)

    def is_dropped(self, theirs: str) -> bool:
        """Return whether the table leaves this tensor out by name."""
        return any(_number_in(theirs, drop.theirs) is not None for drop in self.drops)

    def account(
        self, present: Collection[str], expected: Mapping[str, Collection[int]], source: str
    ) -> dict[str, list[str]]:
        """Return their names of each of our tensors, when `present` are exactly those and dropped ones.

        `expected` are the shapes of ours by name. Raises CheckpointError that lists every unknown and every missing
        key; `source` names the folder in it.
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
    """Return what {i} stands for in `name` ("" where the pattern has none), None where the pattern does not fit."""
    expression = re.escape(pattern).replace(r"\{i\}", f"(?P<i>{_NUMBER})").replace(r"\{e\}", _NUMBER)
    match = re.fullmatch(expression, name)
    return None if match is None else match.groupdict().get("i", "")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
