"""Trace: what one rank's step asks of its device, in the order in which the host asks for it, and no times.

A record is an operation, a collective, a message, a wait, or what a stream does with an event. Records and storages are
columns, since a step has up to a million of them; what repeats (shapes, modules, groups) is held once, and a column
says which. -1 means none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen

Ints = NDArray[np.int64]
NONE = -1
HOST_AXIS = "(CPU tensors)"
"""What is added to the axis of a group where its collectives are on tensors of the host."""
BATCHED = "batched"
"""What Signature.agreed says of a message that goes together with others of its rank."""


class RecordKind(IntEnum):
    """What a record is."""

    OP = 0
    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3
    WAIT = 4
    """A stream waits for the collective or message whose number is in `work`."""
    RECORD_EVENT = 5
    WAIT_EVENT = 6
    """A stream waits for what stood before `event` was recorded."""
    HOST_SYNC = 7
    """The host waits for the device: a number is read, a stream or the device synchronized."""


OpPlace = Literal["device", "host", "to_device", "to_host"]
"""Where an operation runs, or in which direction it copies between the memories of the device and of the host."""


class TensorShape(Frozen):
    """A tensor's format and dims."""

    dtype: str
    dims: tuple[NonNegativeInt, ...]


class Signature(Frozen):
    """An operation on tensors of certain shapes: what it costs depends on nothing else."""

    op: str
    """Its name in torch, with overload, such as aten.mm.default."""
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    flops: NonNegativeInt = 0
    """Floating-point operations, two for a multiplication and addition; 0 of what is no matmul and no attention."""
    is_causal: bool = False
    """Of attention: whether a mask leaves out half of the pairs, which `flops` counts nevertheless."""
    is_tf32: bool = False
    """Of a float32 matmul: whether the device may round its inputs to TF32, as the program allowed."""
    read_bytes: NonNegativeInt = 0
    written_bytes: NonNegativeInt = 0
    managed_read_bytes: NonNegativeInt = 0
    """Of read_bytes, those in managed memory that stays in the host's memory."""
    managed_written_bytes: NonNegativeInt = 0
    """Written there."""
    place: OpPlace = "device"
    agreed: str = ""
    """Of a collective: arguments that all ranks of its group must pass alike: "max", or "root 2 of the group". Of a
    message "tag 2" if it is not 0, and BATCHED.
    """
    sends: tuple[NonNegativeInt, ...] = ()
    """Of an all-to-all, gather or scatter: bytes to each rank of its group; empty where all send and receive alike."""
    receives: tuple[NonNegativeInt, ...] = ()
    """Bytes from each rank of its group, as `sends`."""


class GroupCall(NamedTuple):
    """A call of torch.distributed.new_group() that all ranks have to make."""

    ranks: tuple[int, ...]
    """Global ranks of the new group; empty for all."""
    line: str
    """Of the user's own file that called it, such as train.py:40."""


class Guess(NamedTuple):
    """A number of a tensor by which the program decided what to run, and which it did not put there."""

    line: str
    """Of the user's own file that decided, such as train.py:40."""
    value: str
    """What the number read as."""

    def __str__(self) -> str:
        return (
            f"{self.line} decides by a number that only a real tensor holds; here it reads as {self.value}: "
            "make sure that a usual step goes the same way"
        )


class Traced(Frozen):
    """What was traced, and with what."""

    build: str
    """The builder of the step, as module:function."""
    rank: NonNegativeInt
    world_size: PositiveInt
    torch_version: str
    num_steps_before: NonNegativeInt = 0
    """Steps that ran before the one that was recorded."""
    device: str = "simgpu"
    """What kernels are chosen for: simgpu, an accelerator with streams, or cpu, where the host itself computes."""


@dataclass(frozen=True)
class Records:
    """One element a record."""

    kind: Ints
    stream: Ints
    """Of the device, from 0, the default one."""
    signature: Ints
    """Of operations, collectives and messages."""
    scope: Ints
    """Position of the module in whose code it is, in Trace.scopes."""
    phase: Ints
    """Position in Trace.phases."""
    action: Ints
    """Position in Trace.actions; -1 outside of the pipeline's actions, as in the optimizer."""
    group: Ints
    """Position of the ranks of a collective, or of a message's group, in Trace.groups."""
    peer: Ints
    """Global rank that a message goes to or comes from."""
    num_bytes: Ints
    """Of a message, or of a collective's whole tensor: what all gather, or what each brings to be reduced."""
    work: Ints
    """Number of a collective or a message, and of the one that a wait is for."""
    event: Ints
    line: Ints
    """Position in Trace.lines; -1 where no file of the user's own called it."""

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Storages:
    """One element a storage: memory that the step's tensors are in."""

    num_bytes: Ints
    """As asked for, before an allocator rounds it up; the most that it ever had."""
    allocated_at: Ints
    """Record before which it was made; -1 if it was there before the step."""
    freed_at: Ints
    """Record before which it was given back; -1 if it outlives the step."""
    stream: Ints
    """That it was made on."""

    def __len__(self) -> int:
        return len(self.num_bytes)


@dataclass(frozen=True)
class Uses:
    """One element for each storage that a record reads or writes, in the order of records."""

    record: Ints
    storage: Ints
    writes: Ints
    """1 where the record writes to the storage, 0 where it only reads it."""

    def __len__(self) -> int:
        return len(self.record)


_TABLES = {"records": Records, "storages": Storages, "uses": Uses}
_EARLIER = "earlier."
_TEXTS = ("scopes", "phases", "actions", "group_names", "lines")


@dataclass(frozen=True)
class Trace:
    """One rank's step."""

    traced: Traced
    signatures: tuple[Signature, ...]
    scopes: tuple[str, ...]
    """Fully qualified names of modules, or torch's own marks of what runs between them; of what ranks have to agree on
    and is in neither, the line of the program, such as train.py:40.
    """
    phases: tuple[str, ...]
    """forward, backward, recompute (a forward done again in backward), optimizer."""
    actions: tuple[str, ...]
    """Those of the pipeline's schedule that this rank ran, as spec/layout/schedule/action.py writes them: 2F0."""
    groups: tuple[tuple[int, ...], ...]
    """Global ranks, in the order of their ranks in the group."""
    group_names: tuple[str, ...]
    """For each group the mesh axis that it runs along, such as tp or fsdp; "" where it has no name."""
    records: Records
    storages: Storages
    uses: Uses
    lines: tuple[str, ...] = ()
    """Lines of the user's own files, such as train.py:40."""
    group_calls: tuple[GroupCall, ...] = ()
    """What the rank's program did to make groups, before the step and in it."""
    own_groups: tuple[tuple[int, ...], ...] = ()
    """Global ranks of each group of fewer than all ranks that the rank is in, used or not; only of a user's program."""
    earlier: Trace | None = None
    """What the builder and the calls before this one did that other ranks have to agree on: communication, waits and
    events, without operations and memory; only of a user's program.
    """
    guesses: tuple[Guess, ...] = ()
    """Numbers that no fake tensor holds and that decided what the program runs."""

    def live_bytes(self) -> Ints:
        """Return the bytes of all storages before each record, and after the last [records + 1]."""
        change = np.zeros(len(self.records) + 2, np.int64)
        np.add.at(change, self.storages.allocated_at + 1, self.storages.num_bytes)
        is_freed = self.storages.freed_at != NONE
        np.add.at(change, self.storages.freed_at[is_freed] + 1, -self.storages.num_bytes[is_freed])
        return np.cumsum(change)[1:]

    def save(self, file: Path) -> None:
        """Write the trace to `file` (.npz), which `load` reads back to an equal one."""
        # At numpy's own level this takes five times as long, for a quarter less.
        with ZipFile(file, "w", ZIP_DEFLATED, compresslevel=1) as archive:
            for name, column in self._columns("").items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, column, allow_pickle=False)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Return the trace that `save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            return cls._of_columns(arrays, "")

    def _columns(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the trace as arrays, whose names begin with `prefix`."""
        about = {
            "traced": self.traced.to_dict(),
            "signatures": [one.to_dict() for one in self.signatures],
            "groups": self.groups,
            "group_calls": self.group_calls,
            "own_groups": self.own_groups,
            "guesses": self.guesses,
            **{name: getattr(self, name) for name in _TEXTS},
        }
        columns: dict[str, NDArray[Any]] = {
            f"{prefix}{part}.{field.name}": _narrowed(getattr(getattr(self, part), field.name))
            for part, table in _TABLES.items()
            for field in fields(table)
        }
        earlier = {} if self.earlier is None else self.earlier._columns(f"{prefix}{_EARLIER}")
        return {f"{prefix}about": np.array(json.dumps(about)), **columns, **earlier}

    @classmethod
    def _of_columns(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Self:
        """Return the trace that `_columns` made arrays of."""
        about = json.loads(str(arrays[f"{prefix}about"]))
        parts: dict[str, Any] = {
            part: table(**{one.name: arrays[f"{prefix}{part}.{one.name}"].astype(np.int64) for one in fields(table)})
            for part, table in _TABLES.items()
        }
        earlier = f"{prefix}{_EARLIER}"
        return cls(
            traced=Traced.from_json(json.dumps(about["traced"])),
            signatures=tuple(Signature.from_json(json.dumps(one)) for one in about["signatures"]),
            groups=tuple(tuple(ranks) for ranks in about["groups"]),
            group_calls=tuple(GroupCall(tuple(ranks), line) for ranks, line in about["group_calls"]),
            own_groups=tuple(tuple(ranks) for ranks in about["own_groups"]),
            earlier=cls._of_columns(arrays, earlier) if f"{earlier}about" in arrays else None,
            guesses=tuple(Guess(*one) for one in about.get("guesses", ())),
            **parts | {name: tuple(about[name]) for name in _TEXTS},
        )


def _narrowed(column: Ints) -> NDArray[np.signedinteger]:
    """Return the column in as few bytes an element as hold it: what compresses a file takes its time by the byte."""
    low, high = column.min(initial=0), column.max(initial=0)
    widths = (np.int8, np.int16, np.int32)
    return column.astype(
        next((one for one in widths if np.iinfo(one).min <= low and high <= np.iinfo(one).max), np.int64)
    )
