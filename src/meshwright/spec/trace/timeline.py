"""Timeline: what ran when, on which rank and stream; from the simulator or from a profiler, of one type.

Spans are columns, since a step of many ranks has millions of them; what repeats is held once, and a column says which.
-1 means none.

Prefixes of names in profiles and traces: of ranges that the runtime sets, and of what FSDP2 and DDP do.
Those of a pipeline's actions are in spec/layout/schedule/action.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from meshwright.spec.frozen import Frozen

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SpanKind(IntEnum):
    """What a span is."""

    COMPUTE = 0
    COMMUNICATION = 1
    """A collective or a message, from when all who take part were there."""
    WAIT = 2
    """A stream, or the host, waits for what is not there yet: a collective, a message, a stream."""
    HOST = 3
    """The host prepares what it hands to a stream, or waits for the device to answer."""
    DATA = 4
    """The host reads and hands over the next samples."""


class TensorRole(IntEnum):
    """What memory is for."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER_STATE = 2
    UNSHARDED_PARAMETER = 3
    """Parameters put together from all ranks' shards."""
    ACTIVATION = 4
    """Kept from a forward for its backward."""
    COMMUNICATION = 5
    """What collectives and messages read from and write to, and nothing of the above."""
    TEMPORARY = 6
    """Gone before the phase that made it ends."""
    OTHER = 7


class TimelineSource(Frozen):
    """Where a timeline comes from."""

    kind: Literal["simulated", "measured"]
    name: str
    """The job with its overrides, or the run."""
    world_size: PositiveInt
    cluster: str | None = None
    """Its name and number of devices, where it was simulated."""
    versions: dict[str, str] = {}

    @property
    def place(self) -> str:
        """Return its name, and where it was simulated."""
        return f"{self.name} on {self.cluster}" if self.cluster else self.name


@dataclass(frozen=True)
class Spans:
    """One element a span, of every rank by its start."""

    rank: Ints
    """Global rank."""
    stream: Ints
    """Of the device, from 0, the default one; -1 is the host."""
    start_s: Floats
    """Seconds since the step began, on a clock that all ranks share."""
    end_s: Floats
    kind: Ints
    name: Ints
    """Position in Timeline.names."""
    scope: Ints
    """Position in Timeline.scopes."""
    phase: Ints
    """Position in Timeline.phases."""
    action: Ints
    """Position in Timeline.actions."""
    axis: Ints
    """Position in Timeline.axes, of communication and of waits for it."""
    num_bytes: Ints
    """Of communication, as in Trace.records."""
    record: Ints
    """Position in the rank's trace."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: NDArray[Any]) -> Spans:
        """Return the spans at `rows` (positions or a mask)."""
        return Spans(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class MemoryCurve:
    """One rank's device memory; each value holds from its moment to the next."""

    rank: int
    at_s: Floats
    by_role: Ints
    """Bytes that tensors asked for [moments, TensorRole]."""
    allocated_bytes: Ints
    """As the allocator rounds them up [moments]."""
    reserved_bytes: Ints
    """What the allocator holds of the device [moments]."""
    record: Ints
    """Position in the rank's trace of what ran [moments]."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of some ranks."""

    source: TimelineSource
    step_s: float
    """From the beginning of the step on the first rank to its end on the last."""
    ranks: tuple[int, ...]
    """Global ranks whose spans are here, ascending."""
    multiplicity: tuple[int, ...]
    """For each of them how many ranks do the same, itself included."""
    names: tuple[str, ...]
    """Operations and collectives, as torch calls them."""
    scopes: tuple[str, ...]
    phases: tuple[str, ...]
    """As in Trace.phases."""
    actions: tuple[str, ...]
    axes: tuple[str, ...]
    """Mesh axes: tp, fsdp, pp, ...; "" for groups without a name."""
    spans: Spans
    memory: tuple[MemoryCurve, ...] = ()
    """Of the same ranks; empty where it was not measured."""

    def of_rank(self, rank: int) -> Spans:
        """Return the spans of one rank."""
        return self.spans.take(self.spans.rank == rank)

    def save(self, file: Path) -> None:
        """Write the timeline to `file` (.npz), which `load` reads back to an equal one."""
        about: dict[str, Any] = {name: getattr(self, name) for name in ("step_s", *_TUPLES)}
        about |= {"source": self.source.to_dict(), "memory": [curve.rank for curve in self.memory]}
        columns = {f"spans.{field.name}": getattr(self.spans, field.name) for field in fields(Spans)}
        for number, curve in enumerate(self.memory):
            columns |= {f"memory{number}.{name}": getattr(curve, name) for name in _CURVE}
        with file.open("wb") as stream:
            np.savez_compressed(stream, about=np.array(json.dumps(about)), **columns)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Return the timeline that `save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            # The name of the field in files of before 2026-11-24.
            about.setdefault("multiplicity", about.get("stands_for"))
            spans = Spans(**{field.name: arrays[f"spans.{field.name}"] for field in fields(Spans)})
            memory = tuple(
                MemoryCurve(rank, **{name: arrays[f"memory{number}.{name}"] for name in _CURVE})
                for number, rank in enumerate(about["memory"])
            )
        texts: dict[str, Any] = {name: tuple(about[name]) for name in _TUPLES}
        source = TimelineSource.from_dict(about["source"])
        return cls(source=source, step_s=about["step_s"], spans=spans, memory=memory, **texts)


_TUPLES = ("ranks", "multiplicity", "names", "scopes", "phases", "actions", "axes")
_CURVE = [field.name for field in fields(MemoryCurve) if field.name != "rank"]


STEP_MARK = "ProfilerStep#"
"""Before the number of an optimizer step, from its data to its update; as torch's own profiler calls steps."""

DATA_MARK = "data"
"""Waiting for the samples of a step."""

OWN_REDUCE_GROUP = "_reduce"
"""Suffix of the axis of a group that only reduces gradients (layout.separate_reduce_group)."""
SHARED_HEADS = "_heads"
"""Suffix of the axis of a group of tp ranks that share a key head."""
AXIS_MARK = "axis "
"""Before the description of the process group that a collective or a message runs in, such as mesh_tp."""

FSDP_MARK = "FSDP::"
"""How torch marks what FSDP2 does between modules; a scope that begins with it is no part of the model."""
DDP_MARK = "DDP::"
"""How the tracer marks what DistributedDataParallel does between modules."""

REPLICAS_MARK = f"{DDP_MARK}sum over replicas"
"""How our own sums of gradients over replicas are marked where FSDP2 does not do them."""
MODULE_MARK = "module::"
"""How the calls of modules are marked without FSDP2, in its words: module::pre_forward (blocks.0)."""

NO_AXIS = "other process group"
"""What a group without a mesh axis is called in tables, such as that of all ranks."""
