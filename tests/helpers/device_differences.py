"""What a step traced on the simulated accelerator does otherwise than on a processor, as data, and how to find more.

tests/fake_ranks/tracer/test_devices.py has the table in words. A record is listed if it is in the scope and phase of a
Difference and is one of its operators; all others have to come in the same order on both devices.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace

Bools = NDArray[np.bool_]
EVENTS = ("RECORD_EVENT", "WAIT_EVENT")
ANY_DTYPE = ""


@dataclass(frozen=True)
class Difference:
    """`times` what is done for each record `per`: the operators on either device."""

    why: str
    scope: str
    """A regular expression for the whole name of the module; what stands in none has ""."""
    phases: tuple[str, ...]
    per: str
    """An operator: how often it is on the accelerator, or how much more often on one where it is itself listed."""
    on_cpu: dict[str, int] = field(default_factory=dict)
    on_accelerator: dict[str, int] = field(default_factory=dict)
    dtype: str = ANY_DTYPE
    """Of the result of `per`."""
    num_dims: int | None = None
    """The same; None: any."""
    resized: frozenset[str] = frozenset()
    """Operators that are the same on both, on other shapes."""
    frees: bool = False
    """Whether what was made in forward goes when one of these is done, though none of them uses it."""

    def is_at(self, scope: str, phase: str) -> bool:
        """Return whether it is about a scope and phase."""
        return phase in self.phases and re.fullmatch(self.scope, scope) is not None

    @property
    def operators(self) -> frozenset[str]:
        """Return the operators that it lists."""
        return frozenset((*self.on_cpu, *self.on_accelerator)) | self.resized


class Row(NamedTuple):
    """One record."""

    op: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Of its results: format and dims."""
    scope: str
    phase: str

    @property
    def dtype(self) -> str:
        """Return the format of the first result."""
        return self.shapes[0][0] if self.shapes else ANY_DTYPE

    @property
    def num_dims(self) -> int:
        """Return the number of dims of the first result."""
        return len(self.shapes[0][1]) if self.shapes else 0


def rows_of(trace: Trace) -> list[Row]:
    """Return all records; a line of the program, where there is no module, is taken to be none."""
    records, rows = trace.records, []
    for row, kind in enumerate(records.kind):
        at = records.signature[row]
        op = RecordKind(kind).name if at == NONE else trace.signatures[at].op.removeprefix("aten.")
        shapes = () if at == NONE else tuple((one.dtype, one.dims) for one in trace.signatures[at].outputs)
        scope = trace.scopes[records.scope[row]]
        rows.append(Row(op, shapes, "" if ".py:" in scope else scope, trace.phases[records.phase[row]]))
    return rows


def is_listed(row: Row, table: list[Difference]) -> bool:
    """Return whether the table has a record; events and waits for them are the accelerator's alone."""
    return row.op in EVENTS or any(row.op in one.operators for one in table if one.is_at(row.scope, row.phase))


def is_on_both(row: Row, table: list[Difference]) -> bool:
    """Return whether the other device has this record too: it is not listed, or for its shapes only."""
    here = [one for one in table if one.is_at(row.scope, row.phase)]
    is_resized = any(row.op in one.resized for one in here)
    is_other = any(row.op in one.on_cpu or row.op in one.on_accelerator for one in here)
    return not is_listed(row, table) or (is_resized and not is_other)


def miscounted(cpu: list[Row], accelerator: list[Row], table: list[Difference]) -> list[str]:
    """Return what listed operators are more or less often there than the table says."""
    ours, theirs = (Counter((row.scope, row.phase, row.op) for row in rows) for rows in (accelerator, cpu))
    per = [Counter((*row[2:], row.op, row.dtype, row.num_dims) for row in rows) for rows in (accelerator, cpu)]
    found = []
    for scope, phase in sorted({(row.scope, row.phase) for row in (*cpu, *accelerator)}):
        expected: Counter[str] = Counter()
        listed: set[str] = set()
        for one in table:
            if not one.is_at(scope, phase):
                continue
            listed |= one.operators
            times = _times(one, *(_count(found_of, one, scope, phase) for found_of in per))
            for op in one.operators:
                expected[op] += times * (one.on_accelerator.get(op, 0) - one.on_cpu.get(op, 0))
        for op in listed:
            more = ours[scope, phase, op] - theirs[scope, phase, op]
            if more != expected[op]:
                found.append(f"{scope or 'outside of modules'}, {phase}, {op}: {more:+} and not {expected[op]:+}")
    return found


def _times(one: Difference, on_accelerator: int, on_cpu: int) -> int:
    return abs(on_accelerator - on_cpu) if one.per in one.operators else on_accelerator


def _count(count: Counter[tuple[str, str, str, str, int]], one: Difference, scope: str, phase: str) -> int:
    return sum(
        times
        for (*where, op, dtype, num_dims), times in count.items()
        if where == [scope, phase] and op == one.per
        if one.dtype in (ANY_DTYPE, dtype) and one.num_dims in (None, num_dims)
    )


class Stored(NamedTuple):
    """A storage, by the records that are on both devices."""

    since: int
    """The first of them during which it is there; -1 if it was there before the step."""
    until: int
    """The first of them during which it no longer is."""
    num_bytes: int


@dataclass(frozen=True)
class Memory:
    """The storages of one trace, to be compared with those of the same step on the other device."""

    stored: list[Stored]
    is_listed: Bools
    """Whether a listed record makes it, uses it last or, where the table says that it may, frees it [storages]."""
    is_written: Bools
    """Whether a record of the step writes to it [storages]."""


def memory_of(trace: Trace, table: list[Difference]) -> Memory:
    """Return where storages are among the common records."""
    rows, storages, uses = rows_of(trace), trace.storages, trace.uses
    common = np.flatnonzero([is_on_both(row, table) for row in rows])
    since = np.searchsorted(common, storages.allocated_at)
    since[storages.allocated_at == NONE] = NONE
    until = np.searchsorted(common, storages.freed_at)
    until[storages.freed_at == NONE] = len(common)
    last, is_written = np.full(len(storages), NONE), np.zeros(len(storages), np.bool_)
    np.maximum.at(last, uses.storage, uses.record)
    np.logical_or.at(is_written, uses.storage, uses.writes == 1)
    # -1 is the last place: a storage that nobody made or used in the step.
    is_own = np.array([*(is_listed(row, table) for row in rows), False])
    is_kept = is_own[storages.allocated_at] | is_own[last] | _is_freed(trace, rows, table)
    stored = [Stored(*map(int, one)) for one in zip(since, until, storages.num_bytes, strict=True)]
    return Memory(stored, is_kept, is_written)


def _is_freed(trace: Trace, rows: list[Row], table: list[Difference]) -> Bools:
    """Return whether it was made in forward and goes right after a listed record that frees [storages]."""
    storages, frees = trace.storages, [one for one in table if one.frees]
    does_free = [is_listed(row, table) and any(one.is_at(row.scope, row.phase) for one in frees) for row in rows]
    is_forward = [row.phase == "forward" for row in rows]
    is_after: Bools = np.array([False, *does_free])[storages.freed_at] & (storages.freed_at != NONE)
    is_of_forward: Bools = np.array([*is_forward, False])[storages.allocated_at]
    return is_after & is_of_forward


def unmatched(mine: Memory, other: Memory) -> list[int]:
    """Return the storages that the other device has not at the same place in the step with the same bytes.

    Of equal ones that are too many, those that are listed, then those that are only read. What no common record sees is
    made by listed ones.
    """
    there, found = Counter(other.stored), []
    for at in np.lexsort((~mine.is_written, mine.is_listed)):
        one = mine.stored[at]
        if there[one]:
            there[one] -= 1
        elif one.since < one.until and one.num_bytes:
            found.append(int(at))
    return found


def unexplained(mine: Memory, other: Memory, *, is_host: bool) -> list[Stored]:
    """Return the unmatched storages that no listed record makes or keeps, nor what is in its place on the other device.

    Where the host computes itself (`is_host`), its own tensors are the device's too: what is there before the step and
    only read.
    """
    twins: Counter[tuple[str, int, int]] = Counter()
    for at in unmatched(other, mine):
        if other.is_listed[at]:
            twins.update(_ends(other.stored[at]))
    found = []
    for at in unmatched(mine, other):
        one = mine.stored[at]
        if mine.is_listed[at] or (is_host and one.since == NONE and not mine.is_written[at]):
            continue
        twin = next((end for end in _ends(one) if twins[end]), None)
        if twin is None:
            found.append(one)
        else:
            twins[twin] -= 1
    return found


def _ends(one: Stored) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    return ("since", one.since, one.num_bytes), ("until", one.until, one.num_bytes)


def unmatched_bytes(mine: Memory, other: Memory, num_common: int) -> Ints:
    """Return the bytes of unmatched storages during each common record [num_common]."""
    change = np.zeros(num_common + 1, np.int64)
    for at in unmatched(mine, other):
        since, until, num_bytes = mine.stored[at]
        change[max(since, 0)] += num_bytes
        change[until] -= num_bytes
    return np.cumsum(change)[:-1]
