"""TraceRecorder: collects records and storages while a step runs, numbers them, and makes a Trace of them."""

import weakref
from collections.abc import Hashable
from contextlib import _GeneratorContextManager
from dataclasses import fields
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec.trace.trace import NONE, RecordKind, Records, Signature, Storages, Trace, Traced, Uses
from meshwright.spec.trace.trace_order import by_appearance
from meshwright.tracer.programs.program_lines import innermost_line, line_of_program
from meshwright.tracer.record.scopes import Scopes
from meshwright.tracer.torch_patches.torch_names import with_values

Key = TypeVar("Key", bound=Hashable)
_Columns = dict[str, NDArray[np.int64]]
_IN_BUILDER = "builder"
"""Phase of what is recorded before the first call of the step."""


class Interned(Generic[Key]):
    """Distinct values in order of first appearance."""

    def __init__(self) -> None:
        self._positions: dict[Key, int] = {}

    def position(self, key: Key) -> int:
        """Return the position of `key`, adding it if it is new."""
        return self._positions.setdefault(key, len(self._positions))

    def all(self) -> tuple[Key, ...]:
        """Return all values."""
        return tuple(self._positions)


_SCOPED_BY_LINE = (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE, RecordKind.WAIT)
"""Kinds of records that ranks have to agree on: outside of modules their scope is the line of the program."""


class Mark(NamedTuple):
    """Numbers of records, uses, storages and works at some moment."""

    records: int
    uses: int
    storages: int
    works: int


class TraceRecorder:
    """Collects records in the order in which the host makes them; ignores them while `is_paused`."""

    def __init__(self) -> None:
        self.signatures: Interned[Signature] = Interned()
        self.scopes = Scopes()
        self.scope_names: Interned[str] = Interned()
        self.phases: Interned[str] = Interned()
        self.actions: Interned[str] = Interned()
        self.lines: Interned[str] = Interned()
        self.groups: Interned[tuple[tuple[int, ...], str]] = Interned()
        """Ranks, and the name of the axis."""
        self.stream = 0
        self.is_paused = False
        self.num_works = 0
        self.live_bytes = self.peak_bytes = 0
        self._records: dict[str, list[int]] = {field.name: [] for field in fields(Records)}
        self._storages: dict[str, list[int]] = {field.name: [] for field in fields(Storages)}
        self._uses: dict[str, list[int]] = {field.name: [] for field in fields(Uses)}
        self._gone: list[bool] = []

    def __len__(self) -> int:
        return len(self._records["kind"])

    @property
    def newest(self) -> int:
        """Return the kind of the newest record, -1 before the first."""
        return self._records["kind"][-1] if len(self) else NONE

    def earlier(self, traced: Traced, num_of_builder: int) -> Trace:
        """Return the trace up to now without operations and memory: the records that ranks have to agree on.

        The first `num_of_builder` records are the builder's. Call it before `begin`.
        """
        records = {name: np.array(column, np.int64) for name, column in self._records.items()}
        calls = [self.phases.position(f"{phase or 'call'}, first call") for phase in self.phases.all()]
        records["phase"] = np.array([*calls, NONE])[records["phase"]]
        records["phase"][:num_of_builder] = self.phases.position(_IN_BUILDER)
        is_kept = records["kind"] != RecordKind.OP
        storages = {field.name: np.zeros(0, np.int64) for field in fields(Storages)}
        uses = {field.name: np.zeros(0, np.int64) for field in fields(Uses)}
        return self._trace_of(traced, {name: column[is_kept] for name, column in records.items()}, storages, uses)

    def begin(self) -> None:
        """Discard all records; live storages remain, as those from before the step."""
        self.scopes.begin()
        for column in (*self._records.values(), *self._uses.values()):
            column.clear()
        self._gone = [freed_at != NONE for freed_at in self._storages["freed_at"]]
        self._storages["allocated_at"] = [NONE] * len(self._gone)

    def record(self, kind: RecordKind, **values: int) -> None:
        """Add a record on the current stream, in the current module, phase and action."""
        if not self.is_paused:
            self.append({"kind": int(kind), **self.place(kind), **values})

    def append(self, row: dict[str, int]) -> None:
        """Add a record with these columns, and -1 in the others."""
        for name, column in self._records.items():
            column.append(row.get(name, 0 if name == "num_bytes" else NONE))

    def place(self, kind: RecordKind) -> dict[str, int]:
        """Return the current stream, scope, phase, action and line of a record of this kind."""
        action, scope, line = self.scopes.action, self.scopes.scope, line_of_program()
        if not scope and kind in _SCOPED_BY_LINE:
            scope = line or innermost_line()
        return {
            "stream": self.stream,
            "scope": self.scope_names.position(scope),
            "phase": self.phases.position(self.scopes.phase),
            "action": NONE if action is None else self.actions.position(action),
            "line": self.lines.position(line) if line else NONE,
        }

    def mark(self) -> Mark:
        """Return how much is recorded."""
        return Mark(len(self), len(self._uses["record"]), len(self._storages["num_bytes"]), self.num_works)

    def since(self, mark: Mark) -> dict[str, dict[str, list[int]]]:
        """Return the columns of the records, uses and storages that were added since a mark."""
        tables = [
            ("records", self._records, mark.records),
            ("uses", self._uses, mark.uses),
            ("storages", self._storages, mark.storages),
        ]
        return {table: {name: rows[start:] for name, rows in columns.items()} for table, columns, start in tables}

    def on(self, stream: int) -> _GeneratorContextManager[None]:
        """Add records on another stream within the context."""
        return with_values(self, stream=stream)

    def paused(self) -> _GeneratorContextManager[None]:
        """Ignore records within the context, or during each call of a decorated function."""
        return with_values(self, is_paused=True)

    def new_work(self) -> int:
        """Return the number of the next collective or message."""
        self.num_works += 1
        return self.num_works - 1

    def use(self, storage: int, *, writes: bool) -> None:
        """Add to the newest record that it reads or writes a storage."""
        for name, value in (("record", len(self) - 1), ("storage", storage), ("writes", int(writes))):
            self._uses[name].append(value)

    def allocate(self, num_bytes: int, *, by_newest: bool) -> int:
        """Return the number of a new storage, allocated by the newest record, or before the next."""
        at = max(len(self) - 1, 0) if by_newest else len(self)
        row = {"num_bytes": num_bytes, "allocated_at": at, "freed_at": NONE, "stream": self.stream}
        for name, column in self._storages.items():
            column.append(row[name])
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return len(self._storages["num_bytes"]) - 1

    def free(self, storage: int) -> None:
        """Free a storage."""
        self._storages["freed_at"][storage] = len(self)
        self.live_bytes -= self._storages["num_bytes"][storage]

    def trace(self, traced: Traced) -> Trace:
        """Return the trace since `begin`, without storages freed before it, and without those that FSDP resized to 0:
        the time of that differs between the first microbatch and others.
        """
        is_kept = np.array(self._storages["num_bytes"]) > 0
        is_kept[self._uses["storage"]] = True
        is_kept[: len(self._gone)] &= ~np.array(self._gone, np.bool_)
        storages = {name: np.array(column, np.int64)[is_kept] for name, column in self._storages.items()}
        records = {name: np.array(column, np.int64) for name, column in self._records.items()}
        uses = {name: np.array(column, np.int64) for name, column in self._uses.items()}
        uses["storage"] = (np.cumsum(is_kept) - 1)[uses["storage"]]
        return self._trace_of(traced, records, storages, uses)

    def _trace_of(self, traced: Traced, records: _Columns, storages: _Columns, uses: _Columns) -> Trace:
        """Return a trace of these columns, with the tables that they index."""
        groups = _compacted(records, "group", self.groups)
        return Trace(
            traced=traced,
            signatures=_compacted(records, "signature", self.signatures),
            scopes=_compacted(records, "scope", self.scope_names),
            phases=_compacted(records, "phase", self.phases),
            actions=_compacted(records, "action", self.actions),
            lines=_compacted(records, "line", self.lines),
            groups=tuple(ranks for ranks, _ in groups),
            group_names=tuple(name for _, name in groups),
            records=Records(**records),
            storages=Storages(**storages),
            uses=Uses(**uses),
        )


def _compacted(records: dict[str, NDArray[np.int64]], column: str, interned: Interned[Key]) -> tuple[Key, ...]:
    """Return the values that a column indexes, in order of first appearance, and renumber the column: equal steps then
    have equal columns, independent of earlier ones.
    """
    records[column], used = by_appearance(records[column])
    seen = interned.all()
    return tuple(seen[position] for position in used)


class StorageNumbers:
    """Numbers of live storages, and the collective that wrote each last."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self._storages: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """By address the number, the size and the storage."""
        self._works: dict[int, int] = {}

    def follow(self, storage: torch.UntypedStorage, *, by_newest: bool = True) -> int:
        """Return a storage's number: a new one if it is new, or was resized since it was last seen.

        New memory is allocated by the newest record, unless the program resized it (`by_newest` is False).
        """
        known = self.number_of(storage)
        if known is not None:
            return known
        self._free(storage._cdata)
        number = self._recorder.allocate(storage.nbytes(), by_newest=by_newest)
        self._add(storage, number)
        return number

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a known storage of unchanged size; None for others."""
        known = self._storages.get(storage._cdata)
        return known[0] if known is not None and known[1] == storage.nbytes() else None

    def adopt(self, tensor: Tensor, number: int, work: int) -> None:
        """Register a tensor's new storage as number `number`, last written by the collective `work` if not -1."""
        self._add(tensor.untyped_storage(), number)
        if work != NONE:
            self.set_work(tensor, work)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a storage that was resized, as FSDP does to free unsharded parameters."""
        if storage._cdata in self._storages:
            self.follow(storage, by_newest=False)

    def set_work(self, tensor: Tensor, work: int) -> None:
        """Register the collective that writes a tensor's storage."""
        self._works[tensor.untyped_storage()._cdata] = work

    def work_of(self, tensor: Tensor) -> int:
        """Return the collective that wrote a tensor's storage last; -1 for none."""
        return self._works.get(tensor.untyped_storage()._cdata, NONE)

    def _add(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata
        alive = weakref.ref(storage, lambda _: self._free(key, number))
        self._storages[key] = (number, storage.nbytes(), alive)

    def _free(self, key: int, number: int | None = None) -> None:
        """Free the storage at an address, unless it is another one than `number`."""
        known = self._storages.get(key)
        if known is not None and number in (None, known[0]):
            del self._storages[key]
            self._works.pop(key, None)
            self._recorder.free(known[0])
