"""NameMap: a table of tensor names and layouts that defines export and import, and accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshwright.errors import CheckpointError, ConfigError
from meshwright.units import first_of

BUFFER = "buffer."
"""Prefix of a buffer's name in a checkpoint; parameters have none, and a table need not write it."""

_NUM_NAMED = 6
_EXPERT, _REST = "e", "rest"
_FIELD = re.compile(r"\{(\w*)\}")
_NUMBER = "(?:0|[1-9][0-9]*)"


@dataclass(frozen=True)
class Part:
    """A range of one dim of a tensor that several tensors of the other side make up."""

    index: int
    """Position among the parts."""
    shares: tuple[int, ...]
    """Relative sizes of all parts, in their order: (1, 1, 1) for thirds."""
    dim: int = 0
    """Dim that is divided."""
    is_interleaved: bool = False
    """Whether the parts, of equal sizes, alternate: element i of the whole is of part i % len(shares)."""

    def __post_init__(self) -> None:
        _set(self, "shares", tuple(self.shares))
        if not (0 <= self.index < len(self.shares) and min(self.shares) > 0 and self.dim >= 0):
            raise ConfigError(f"{self}: shares must be positive, index one of them, counted from 0, and dim 0 or more")
        if self.is_interleaved and len(set(self.shares)) > 1:
            raise ConfigError(f"{self}: interleaved parts have equal shares: set shares to as many ones")

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
    """One tensor under two names and in two layouts.

    Names may have fields: {i}, {j} and other letters are numbers, such as that of a layer, and {rest} is any text, the
    same in both names. {e} in theirs is the number of an expert: our tensor stacks theirs of all experts along dim 0.
    Their layout follows from ours in this order: stacked experts apart, our part taken, rows reordered for
    RoPE, transposed, parts fused. Raises ConfigError for fields that only one of the names has.
    """

    ours: str
    """Name in our model's state_dict."""
    theirs: str
    """Name in the Hugging Face folder."""
    is_transposed: bool = False
    """Whether theirs is the transposed matrix."""
    part: Part | None = None
    """Which part of theirs ours is, with a row for each of our tensors; None where ours is the whole."""
    interleaved_heads: int | None = None
    """Number of heads in whose rows their RoPE turns neighbours (2i, 2i + 1), and ours i and i + head_dim / 2."""
    our_interleaved_heads: int | None = None
    """Number of heads where it is our RoPE that turns neighbours, as Meta's Llama does, and theirs that does not."""
    our_part: Part | None = None
    """Which part of ours theirs is, with a row for each of their tensors; None where theirs is the whole."""
    has_experts: bool = False
    """Whether dim 0 counts experts in both, each of which has the layout."""

    def __post_init__(self) -> None:
        ours, theirs = (fields_of(pattern) for pattern in (self.ours, self.theirs))
        unusable = {name for name in ours | theirs if not name.isidentifier()}
        if wrong := sorted((ours ^ theirs) - {_EXPERT} | ours & {_EXPERT} | unusable):
            raise ConfigError(
                f"Rename({self.ours!r}, {self.theirs!r}): {first_of([f'{{{name}}}' for name in wrong])} must be in "
                "both names, or {e} in theirs alone: correct the row"
            )
        for one, other in (("part", "our_part"), ("interleaved_heads", "our_interleaved_heads")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(
                    f"Rename({self.ours!r}, {self.theirs!r}) has {one} and {other}, which exclude each other: leave "
                    "one out"
                )

    @property
    def is_stacked(self) -> bool:
        """Return whether ours stacks several of theirs."""
        return "{e}" in self.theirs

    @property
    def keeps_rows(self) -> bool:
        """Return whether each row of ours (an expert, if stacked) is the same row of theirs."""
        moves = self.is_transposed or self.part or self.our_part or self.interleaved_heads or self.our_interleaved_heads
        return self.is_stacked or self.has_experts or not moves

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each of their tensors that make up ours, of `shape`, or that ours is a part of."""
        sizes = list(shape[1:] if self.is_stacked else shape)
        if self.our_part is not None:
            start, end = self.our_part.range_of(sizes[self.our_part.dim])
            sizes[self.our_part.dim] = end - start
        if self.is_transposed:
            sizes[-2:] = reversed(sizes[-2:])
        if self.part is not None:
            sizes[self.part.dim] = self.part.fused_size(sizes[self.part.dim])
        return tuple(sizes)


@dataclass(frozen=True)
class Drop:
    """A tensor of theirs that is ignored by name."""

    theirs: str
    """Its name; {i} is any layer number, {rest} any text."""
    reason: str
    """Why, as an import prints it."""
    copy_of: str | None = None
    """Our tensor that it must equal, such as the embedding to which a head is tied; None where any value is ignored."""

    def __post_init__(self) -> None:
        if wrong := [f"{{{name}}}" for name in fields_of(self.theirs) if not name.isidentifier()]:
            raise ConfigError(f"Drop({self.theirs!r}): {first_of(wrong)} is no field: write {{i}} or {{rest}}")


@dataclass(frozen=True)
class NameMap:
    """Names and layouts of a model's tensors in both formats; the first row that matches a name is its row."""

    renames: tuple[Rename, ...]
    drops: tuple[Drop, ...] = ()
    prefix: str = ""
    """Prefix of their names in folders of the whole model; folders without a head lack it."""

    def __post_init__(self) -> None:
        for name, kind in (("renames", Rename), ("drops", Drop)):
            _set(self, name, _all_of(kind, getattr(self, name), f"NameMap.{name}"))

    def spelled_as(self, present: Collection[str]) -> NameMap:
        """Return the table for a folder with these names: without the prefix if no name has it."""
        if not self.prefix or any(name.startswith(self.prefix) for name in present):
            return self
        return NameMap(
            tuple(replace(rename, theirs=rename.theirs.removeprefix(self.prefix)) for rename in self.renames),
            tuple(replace(drop, theirs=drop.theirs.removeprefix(self.prefix)) for drop in self.drops),
        )

    def rows_of(self, ours: str) -> tuple[Rename, ...]:
        """Return the row of one of our tensors, or those of its parts by index; CheckpointError for an unknown one."""
        if rows := self.find_rows(ours):
            return rows
        raise CheckpointError(
            f"the parameter {ours} has no Hugging Face name: the model is not of the family of this name map"
        )

    def find_rows(self, ours: str) -> tuple[Rename, ...]:
        """Return the row of one of our tensors, or those of its parts by index; none for an unknown one."""
        for rename in self.renames:
            if _fields_of_ours(ours, rename.ours) is not None:
                if rename.our_part is None:
                    return (rename,)
                rows = [(row.our_part.index, row) for row in self.renames if row.ours == rename.ours and row.our_part]
                return tuple(row for _, row in sorted(rows, key=lambda row: row[0]))
        return ()

    def theirs(self, ours: str, shape: Collection[int] = ()) -> list[str]:
        """Return their names of one of our tensors: one, one for each of shape[0] experts, or those of its parts."""
        names = [their_name(row, ours) for row in self.rows_of(ours)]
        experts = range(next(iter(shape), 0))
        return [
            one
            for name in names
            for one in ([name.replace("{e}", str(e)) for e in experts] if "{e}" in name else [name])
        ]

    def drop_of(self, theirs: str) -> Drop | None:
        """Return why this tensor is ignored; None if it is not."""
        return next((drop for drop in self.drops if _fields(theirs, drop.theirs) is not None), None)

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

        `expected` are our shapes by name. Raises ConfigError that lists unknown and missing keys of `source`.
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
            raise ConfigError(
                f"the tensors of {source} are not those of its architecture ({'; '.join(problems)}): "
                "make the architecture (config.json, or [model] of the job) match the weights, or take the whole folder"
            )
        return theirs


def fields_of(pattern: str) -> set[str]:
    """Return the names of the fields of a pattern, without braces."""
    return set(_FIELD.findall(pattern))


def their_name(row: Rename, ours: str) -> str:
    """Return their name of one of our tensors, which `row` must match; {e} is left as it is."""
    fields = _fields_of_ours(ours, row.ours)
    assert fields is not None
    return _filled(row.theirs, fields)


def _all_of(kind: type, values: Any, place: str) -> tuple[Any, ...]:
    """Return `values` as a tuple; raises ConfigError unless all are of `kind`."""
    given = tuple(values) if isinstance(values, Iterable) else (values,)
    wrong = [type(value).__name__ for value in given if not isinstance(value, kind)]
    if wrong or not isinstance(values, Iterable):
        raise ConfigError(
            f"{place} must be a sequence of {kind.__name__}, and holds {first_of(wrong) or 'one alone'}: correct it, "
            f"such as ({kind.__name__}(...),)"
        )
    return given


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    pieces, seen = _FIELD.split(pattern), set[str]()
    for place in range(0, len(pieces), 2):
        pieces[place] = re.escape(pieces[place])
    for place in range(1, len(pieces), 2):
        field = pieces[place]
        pieces[place] = _NUMBER if field == _EXPERT else f"(?P<{field}>{'.+' if field == _REST else _NUMBER})"
        if field in seen:
            pieces[place] = f"(?P={field})"
        seen |= {field} - {_EXPERT}
    return re.compile("".join(pieces))


def _fields(name: str, pattern: str) -> dict[str, str] | None:
    """Return the fields of `pattern` in `name`, None if it does not match."""
    match = _expression(pattern).fullmatch(name)
    return None if match is None else match.groupdict()


def _fields_of_ours(name: str, pattern: str) -> dict[str, str] | None:
    """Return the fields of `pattern` in our name; a pattern may leave out the prefix of a buffer."""
    return _fields(name if pattern.startswith(BUFFER) else name.removeprefix(BUFFER), pattern)


def _filled(pattern: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda field: fields.get(field[1], field[0]), pattern)


def _set(frozen: object, name: str, value: object) -> None:
    object.__setattr__(frozen, name, value)
