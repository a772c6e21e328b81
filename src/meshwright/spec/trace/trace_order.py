"""Whether two ranks do the same: their traces, numbered alike and compared record by record.

Works, events and storages have whatever numbers the program gave them; here they are numbered in the order in which
they first appear. Groups count by their shape and not by their ranks, which differ between any two ranks.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Records, Storages, Trace, Uses

_COUNTED = ("work", "event")
_TABLES = {"signature": "signatures", "scope": "scopes", "phase": "phases", "action": "actions", "line": "lines"}
_SAME_ON_ALL = ("kind", "stream", "signature", "phase", "action", "num_bytes", *_COUNTED)
"""Columns that symmetric ranks share: their scopes are equal, too, but pipeline ranks name other blocks."""


def in_order(trace: Trace) -> Trace:
    """Return the same trace with everything that is numbered, numbered by its first appearance."""
    columns = dict(vars(trace.records))
    tables: dict[str, Any] = {}
    for name, table in _TABLES.items():
        columns[name], used = by_appearance(columns[name])
        entries = getattr(trace, table)
        tables[table] = tuple(entries[position] for position in used)
    columns["group"], used = by_appearance(columns["group"])
    tables["groups"] = tuple(trace.groups[position] for position in used)
    tables["group_names"] = tuple(trace.group_names[position] for position in used)
    columns |= {name: by_appearance(columns[name])[0] for name in _COUNTED}
    number, order = _storage_order(trace.storages)
    storages = Storages(**{name: column[order] for name, column in vars(trace.storages).items()})
    uses = Uses(trace.uses.record, number[trace.uses.storage], trace.uses.writes)
    return replace(trace, records=Records(**columns), storages=storages, uses=uses, **tables)


def by_appearance(column: Ints) -> tuple[Ints, list[int]]:
    """Return the column with its values numbered by first appearance, and the values; -1 stays.

    Values are numbers of things that were counted: what it takes grows with the largest.
    """
    first = np.full(int(column.max(initial=NONE)) + 2, NONE, np.int64)
    # Of equal values the last assignment holds; the last element is that of -1.
    first[column[::-1]] = np.arange(len(column))[::-1]
    used = np.flatnonzero(first[:-1] != NONE)
    order = used[np.argsort(first[used])]
    number = np.full(len(first), NONE, np.int64)
    number[order] = np.arange(len(order))
    return number[column], order.tolist()


def fingerprint(trace: Trace) -> str:
    """Return a hash that ranks share if they do the same: operations, sizes, order, and the lives of storages."""
    digest = hashlib.blake2b(digest_size=16)
    for _, part in _parts(in_order(trace)):
        digest.update(json.dumps(part).encode() if isinstance(part, list) else part.tobytes())
    return digest.hexdigest()


def first_difference(one: Trace, other: Trace) -> str | None:
    """Return where two ranks differ first, in words; None if their fingerprints are equal."""
    one, other = in_order(one), in_order(other)
    found = [at for name in _SAME_ON_ALL if (at := _first_unequal(one, other, name)) is not None]
    if found or len(one.records) != len(other.records):
        at = min(found, default=min(len(one.records), len(other.records)))
        return f"record {at} is {_described(one, at)} on the one and {_described(other, at)} on the other"
    for (name, ours), (_, theirs) in zip(_parts(one), _parts(other), strict=True):
        if isinstance(ours, list):
            if ours != theirs:
                return f"their {name} differ"
        elif len(ours) != len(theirs) or (ours != theirs).any():
            short = min(len(ours), len(theirs))
            unequal = np.flatnonzero(ours[:short] != theirs[:short])
            return f"{name} differs first at {int(unequal[0]) if len(unequal) else short}"
    return None


def _parts(trace: Trace) -> Iterator[tuple[str, Ints | list[object]]]:
    """Yield all that counts, by name."""
    for name in _SAME_ON_ALL:
        yield name, getattr(trace.records, name)
    yield "group", trace.records.group
    yield "peer", (trace.records.peer != NONE).astype(np.int64)
    for table in (trace.storages, trace.uses):
        for field in fields(table):
            yield f"{type(table).__name__.lower()}.{field.name}", getattr(table, field.name)
    yield "signatures", [one.to_dict() for one in trace.signatures]
    yield "phases", [*trace.phases]
    yield "actions", [*trace.actions]
    yield "groups", [[len(ranks), name] for ranks, name in zip(trace.groups, trace.group_names, strict=True)]


def _storage_order(storages: Storages) -> tuple[Ints, Ints]:
    """Return the new number of each storage, and the old one of each: those of before the step first."""
    order = np.argsort(storages.allocated_at, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number, order


def _first_unequal(one: Trace, other: Trace, name: str) -> int | None:
    ours, theirs = getattr(one.records, name), getattr(other.records, name)
    short = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:short] != theirs[:short])
    if name == "signature":
        # Equal numbers can mean other shapes.
        same = [a == b for a, b in zip(one.signatures, other.signatures, strict=False)]
        is_other = np.array([*(not equal for equal in same), False])
        unequal = np.flatnonzero((ours[:short] != theirs[:short]) | is_other[ours[:short].clip(NONE, len(same))])
    return int(unequal[0]) if len(unequal) else None


def _described(trace: Trace, at: int) -> str:
    if at >= len(trace.records):
        return "nothing"
    row = trace.records
    kind = RecordKind(row.kind[at]).name.lower().replace("_", " ")
    where = f" in {scope}" if (scope := trace.scopes[row.scope[at]]) else ""
    if row.signature[at] == NONE:
        return f"{kind}{where}"
    signature = trace.signatures[row.signature[at]]
    shapes = ", ".join(f"{one.dtype}{list(one.dims)}" for one in signature.inputs)
    return f"{signature.op}({shapes}){where}"
