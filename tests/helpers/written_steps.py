"""Traces written by hand, record by record, for what reads traces."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from meshwright.spec.trace.trace import (
    NONE,
    RecordKind,
    Records,
    Signature,
    Storages,
    TensorShape,
    Trace,
    Traced,
    Uses,
)


class WrittenStep:
    """A step that grows by one record at a time, on the default stream and outside of any module if nothing is said."""

    def __init__(self) -> None:
        self.phase, self.scope, self.action = "forward", "", ""
        self._names: dict[str, dict[object, int]] = {name: {} for name in ("signature", "scope", "phase", "action")}
        self._records: dict[str, list[int]] = {field.name: [] for field in fields(Records)}
        self._storages: list[tuple[int, int, int, int]] = []
        self._uses: list[tuple[int, int, int]] = []

    def there(self, num_bytes: int) -> int:
        """Return a new storage that was there before the step."""
        return self._storage(num_bytes, NONE)

    def make(self, num_bytes: int, *, reads: tuple[int, ...] = (), op: str = "aten.mm.default", flops: int = 0) -> int:
        """Return the new storage that an operation writes to."""
        storage = self._storage(num_bytes, len(self))
        self.op(reads=reads, writes=(storage,), op=op, flops=flops)
        return storage

    def op(
        self,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        op: str = "aten.mm.default",
        flops: int = 0,
        **columns: int,
    ) -> None:
        """Add an operation, or another kind of record where `columns` says so."""
        shapes = tuple(TensorShape(dtype="float32", dims=(self._storages[one][0] // 4,)) for one in (*reads, *writes))
        signature = Signature(op=op, inputs=shapes[: len(reads)], outputs=shapes[len(reads) :], flops=flops)
        self._uses += [(len(self), storage, 0) for storage in reads]
        self._uses += [(len(self), storage, 1) for storage in writes]
        texts: dict[str, object] = {"signature": signature, "scope": self.scope, "phase": self.phase}
        texts |= {"action": self.action} if self.action else {}
        row = {"kind": int(RecordKind.OP), "stream": 0, "num_bytes": 0}
        row |= {name: self._names[name].setdefault(text, len(self._names[name])) for name, text in texts.items()}
        for name, column in self._records.items():
            column.append((row | columns).get(name, NONE))

    def free(self, *storages: int) -> None:
        """Give storages back before the next record."""
        for storage in storages:
            num_bytes, allocated_at, _, stream = self._storages[storage]
            self._storages[storage] = (num_bytes, allocated_at, len(self), stream)

    def trace(self) -> Trace:
        """Return what was written, as rank 0 of 2."""
        records = {name: np.array(column, np.int64) for name, column in self._records.items()}
        texts = {name: tuple(str(text) for text in self._names[name]) for name in ("scope", "phase", "action")}
        return Trace(
            traced=Traced(build="written:by_hand", rank=0, world_size=2, torch_version="0"),
            signatures=tuple(self._names["signature"]),  # type: ignore[arg-type]
            **{f"{name}s": found for name, found in texts.items()},  # type: ignore[arg-type]
            groups=((0, 1),),
            group_names=("fsdp",),
            records=Records(**records),
            storages=Storages(*np.array(self._storages, np.int64).reshape(-1, 4).T),
            uses=Uses(*np.array(self._uses, np.int64).reshape(-1, 3).T),
        )

    def __len__(self) -> int:
        return len(self._records["kind"])

    def _storage(self, num_bytes: int, allocated_at: int) -> int:
        self._storages.append((num_bytes, allocated_at, NONE, 0))
        return len(self._storages) - 1
