"""NameMap: a table of tensor names and layouts that defines export and import, and accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

from meshwright.errors import CheckpointError
from meshwright.units import first_of

_NUM_NAMED = 6
_NUMBER = "(0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Part:
    """A range of one dim of a fused tensor of theirs."""

    index: int
    """Position among the parts."""
    shares: tuple[int, ...]
    """Relative sizes of all parts, in their order: (1, 1, 1) for thirds."""
    dim: int = 0
    """Dim of their tensor that is divided."""
    is_interleaved: bool = False
    """Whether the parts, of equal sizes, alternate: element i of theirs is of part i % len(shares)."""

    def range_of(self, size: int) -> tuple[int, int]:
        """Return (start, end) of this part of `size` elements."""
        each = size // sum(self.shares)
        start = each * sum(self.shares[: self.index])
        return start, start + each * self.shares[self.index]

    def fused_size(self, size: int) -> int:
        """Return the elements of all parts together, where this one has `size`."""
        return size * sum(self.shares) // self.shares[self.index]


@dataclass(frozen=True)
class Rename:
    """One tensor under two names and in two layouts; {i} is the same layer number in both.

    {e} in theirs is the number of an expert: our tensor stacks theirs of all experts along dim 0. Their layout follows
    from ours in this order: stacked experts apart, rows of RoPE interleaved, transposed, parts fused. Of tensors with a
    dim of experts in front the last two dims are transposed.
    """

    ours: str
    theirs: str
    is_transposed: bool = False
    """Whether theirs is the transposed matrix."""
    part: Part | None = None
    """Which part of theirs ours is; None where ours is the whole."""
    interleaved_heads: int | None = None
    """Number of heads in whose rows their RoPE turns neighbours (2i, 2i + 1), and ours i and i + head_dim / 2."""

    has_experts: bool = False
    """Whether dim 0 counts experts in both, each of which has the layout."""

    @property
    def is_stacked(self) -> bool:
        """Return whether ours stacks several of theirs."""
        return "{e}" in self.theirs

    @property
    def keeps_rows(self) -> bool:
        """Return whether each row of ours (an expert, if stacked) is the same row of theirs."""
        return self.is_stacked or self.has_experts or not (self.is_transposed or self.part or self.interleaved_heads)


@dataclass(frozen=True)
class Drop:
    """A tensor of theirs that is ignored by name."""

    theirs: str
    """Its name; {i} is any layer number, {rest} any text."""
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

    def drop_of(self, theirs: str) -> Drop | None:
        """Return why this tensor is ignored; None if it is not."""
        return next((drop for drop in self.drops if _number_in(theirs, drop.theirs) is not None), None)

    def dropped(self, present: Collection[str]) -> dict[str, list[str]]:
        """Return the names that are ignored, by reason."""
        found: dict[str, list[str]] = {}
        for name in sorted(present):
            if (drop := self.drop_of(name)) is not None:
                found.setdefault(drop.reason, []).append(name)
        return found

    def account(
        self, present: Collection[str], expected: Mapping[str, Collection[int]], source: str
    ) -> dict[str, list[str]]:
        """Return their names of each of our tensors; `present` must be exactly these and ignored ones.

        `expected` are our shapes by name. Raises CheckpointError that lists unknown and missing keys of `source`.
        """
        theirs = {name: self.theirs(name, shape) for name, shape in expected.items()}
        known = {part for parts in theirs.values() for part in parts}
        unknown = sorted(name for name in set(present) - known if self.drop_of(name) is None)
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


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    fields = {r"\{i\}": f"(?P<i>{_NUMBER})", r"\{e\}": _NUMBER, r"\{rest\}": ".+"}
    text = re.escape(pattern)
    for field, expression in fields.items():
        text = text.replace(field, expression)
    return re.compile(text)


def _number_in(name: str, pattern: str) -> str | None:
    """Return {i} in `name` ("" if the pattern has none), None if the pattern does not match."""
    match = _expression(pattern).fullmatch(name)
    return None if match is None else match.groupdict().get("i", "")
