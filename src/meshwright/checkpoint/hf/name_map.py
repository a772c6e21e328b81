"""NameMap: one table of names from which both directions of a conversion follow, and which accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from meshwright.errors import CheckpointError

_NUM_NAMED = 6


@dataclass(frozen=True)
class Rename:
    """One tensor under two names; {i} stands for the same number in both."""

    ours: str
    theirs: str


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

    def theirs(self, ours: str) -> str:
        """Return their name of one of our parameters."""
        for rename in self.renames:
            if (name := _translated(ours, rename.ours, rename.theirs)) is not None:
                return name
        raise CheckpointError(
            f"the parameter {ours} has no Hugging Face name: the model is not of the family of this name map"
        )

    def ours(self, theirs: str) -> str | None:
        """Return our name of one of their tensors, None for one that the table does not know."""
        names = (_translated(theirs, rename.theirs, rename.ours) for rename in self.renames)
        return next((name for name in names if name is not None), None)

    def is_dropped(self, theirs: str) -> bool:
        """Return whether the table leaves this tensor out by name."""
        return any(_number_in(theirs, drop.theirs) is not None for drop in self.drops)

    def account(self, present: Collection[str], expected: Collection[str], source: str) -> dict[str, str]:
        """Return their name of each of our `expected` parameters, when `present` are exactly those and dropped ones.

        Raises CheckpointError that lists every unknown and every missing key; `source` names the folder in it.
        """
        theirs = {name: self.theirs(name) for name in expected}
        unknown = sorted(name for name in set(present) - set(theirs.values()) if not self.is_dropped(name))
        missing = sorted(set(theirs.values()) - set(present))
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


def _translated(name: str, pattern: str, other: str) -> str | None:
    number = _number_in(name, pattern)
    return None if number is None else other.replace("{i}", number)


def _number_in(name: str, pattern: str) -> str | None:
    """Return what {i} stands for in `name` ("" where the pattern has none), None where the pattern does not fit."""
    before, brace, after = pattern.partition("{i}")
    if not brace:
        return "" if name == pattern else None
    match = re.fullmatch(f"{re.escape(before)}(0|[1-9][0-9]*){re.escape(after)}", name)
    return None if match is None else match[1]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"
