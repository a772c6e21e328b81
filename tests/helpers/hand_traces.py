"""Traces written by hand, record by record, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from meshwright.simulator.engine.build_timeline import RecordIntervals, intervals_of
from meshwright.simulator.engine.collective_times import CommOpTimes
from meshwright.simulator.engine.conditions import USUAL, Conditions
from meshwright.simulator.engine.engine import Execution
from meshwright.simulator.engine.execute import Costs, execute
from meshwright.simulator.engine.matching import CommOps, match
from meshwright.simulator.engine.program import RecordTimes, on_one_stream
from meshwright.spec.trace.trace import NONE, RecordKind, Records, Signature, Storages, TensorShape, Trace, Traced, Uses
from meshwright.spec.trace.traces import Traces

ALL_REDUCE = "c10d.allreduce_.default"
ALL_GATHER = "c10d._allgather_base_.default"
_COLUMNS = tuple(field.name for field in fields(Records))


class Script:
    """One rank's step; what takes time says how long, in seconds of the device or of the wire."""

    def __init__(self, rank: int = 0, world_size: int = 1, device: str = "simgpu") -> None:
        self.traced = Traced(build="by:hand", rank=rank, world_size=world_size, torch_version="2", device=device)
        self.rows: list[dict[str, int]] = []
        self.device_s: list[float] = []
        self.host_s: list[float] = []
        self.wire_s: dict[int, float] = {}
        self.signatures: dict[Signature, int] = {}
        self.groups: dict[tuple[tuple[int, ...], str], int] = {}
        self.actions: dict[str, int] = {}
        self.storages: list[tuple[int, int, int, int]] = []
        self.uses: list[tuple[int, int, int]] = []
        self._num_works = self._num_events = 0
        self._agreed = ""

    def op(self, device_s: float = 0.0, stream: int = 0, host_s: float = 0.0) -> int:
        return self._add(RecordKind.OP, stream, device_s, host_s, signature=self._signature("aten.add.Tensor"))

    def collective(
        self,
        ranks: tuple[int, ...],
        wire_s: float = 0.0,
        op: str = ALL_REDUCE,
        axis: str = "",
        num_bytes: int = 8,
        **passed: Any,
    ) -> int:
        """Return the work of a collective; `passed` are other fields of its signature."""
        group = self.groups.setdefault((ranks, axis), len(self.groups))
        signature = self._signature(op, **passed)
        return self._meet(RecordKind.COLLECTIVE, wire_s, signature, group=group, num_bytes=num_bytes)

    def send(self, peer: int, ranks: tuple[int, ...], wire_s: float = 0.0, num_bytes: int = 8) -> int:
        return self._message(RecordKind.SEND, peer, ranks, wire_s, num_bytes)

    def receive(self, peer: int, ranks: tuple[int, ...], wire_s: float = 0.0, num_bytes: int = 8) -> int:
        return self._message(RecordKind.RECEIVE, peer, ranks, wire_s, num_bytes)

    def agreeing(self, agreed: str, ask: Callable[[], int]) -> int:
        """Return what `ask` does, with what the signatures of its messages agree on."""
        self._agreed = agreed
        try:
            return ask()
        finally:
            self._agreed = ""

    def wait(self, work: int, stream: int = 0) -> int:
        return self._add(RecordKind.WAIT, stream, work=work)

    def record_event(self, stream: int = 0) -> int:
        self._num_events += 1
        self._add(RecordKind.RECORD_EVENT, stream, event=self._num_events)
        return self._num_events

    def wait_event(self, event: int, stream: int = 0) -> int:
        return self._add(RecordKind.WAIT_EVENT, stream, event=event)

    def sync(self, stream: int = 0, event: int = NONE) -> int:
        return self._add(RecordKind.HOST_SYNC, stream, event=event)

    def use(self, storage: int, *, writes: bool = False) -> None:
        """Add that the newest record reads or writes a storage."""
        self.uses.append((len(self.rows) - 1, storage, int(writes)))

    def allocate(self, num_bytes: int) -> int:
        """Return a storage that is there from the newest record on; before any record, from before the step on."""
        self.storages.append((num_bytes, len(self.rows) - 1, NONE, 0))
        return len(self.storages) - 1

    def free(self, storage: int) -> None:
        num_bytes, allocated_at, _, stream = self.storages[storage]
        self.storages[storage] = (num_bytes, allocated_at, len(self.rows), stream)

    def trace(self) -> Trace:
        records = {name: np.array([row[name] for row in self.rows], np.int64) for name in _COLUMNS}
        storages = np.array(self.storages, np.int64).reshape(-1, 4).T
        uses = np.array(self.uses, np.int64).reshape(-1, 3).T
        return Trace(
            traced=self.traced,
            signatures=tuple(self.signatures),
            scopes=("",),
            phases=("forward",),
            actions=tuple(self.actions),
            groups=tuple(ranks for ranks, _ in self.groups),
            group_names=tuple(name for _, name in self.groups),
            records=Records(**records),
            storages=Storages(*storages),
            uses=Uses(*uses),
        )

    def _message(self, kind: RecordKind, peer: int, ranks: tuple[int, ...], wire_s: float, num_bytes: int) -> int:
        group = self.groups.setdefault((ranks, "pp"), len(self.groups))
        op = "c10d.send.default" if kind == RecordKind.SEND else "c10d.recv_.default"
        signature = self._signature(op, agreed=self._agreed)
        return self._meet(kind, wire_s, signature, group=group, peer=peer, num_bytes=num_bytes)

    def _meet(self, kind: RecordKind, wire_s: float, signature: int, **columns: int) -> int:
        self._num_works += 1
        row = self._add(kind, 0, signature=signature, work=self._num_works, **columns)
        self.wire_s[row] = wire_s
        return self._num_works

    def _signature(self, op: str, **passed: Any) -> int:
        shape = TensorShape(dtype="float32", dims=(1024,))
        signature = Signature(op=op, inputs=(shape,), outputs=(shape,), read_bytes=4096, written_bytes=4096, **passed)
        return self.signatures.setdefault(signature, len(self.signatures))

    def _add(self, kind: RecordKind, stream: int, device_s: float = 0.0, host_s: float = 0.0, **columns: int) -> int:
        row = dict.fromkeys(_COLUMNS, NONE) | {"scope": 0, "phase": 0, "num_bytes": 0}
        self.rows.append(row | {"kind": int(kind), "stream": stream} | columns)
        self.device_s.append(device_s)
        self.host_s.append(host_s)
        return len(self.rows) - 1


def all_of(*scripts: Script) -> Traces:
    return Traces.all_of({script.traced.rank: script.trace() for script in scripts})


def execute_scripts(
    traces: Traces,
    scripts: tuple[Script, ...],
    conditions: Conditions = USUAL,
    load: float = 1.0,
    slowdown: float = 0.0,
) -> tuple[CommOps, Execution, dict[int, RecordIntervals]]:
    """Return what was execution, each comm op on the links inside its domain, which it takes a share `load` of."""
    comm_ops = match(traces)
    wire_s, ones = np.zeros(len(comm_ops)), np.ones(len(comm_ops))
    records = {}
    for script in scripts:
        rank = script.traced.rank
        records[rank] = RecordTimes(np.array(script.device_s), np.array(script.host_s))
        for row, seconds in script.wire_s.items():
            wire_s[comm_ops.of_record[rank][row]] = seconds
    times = CommOpTimes(0 * ones, wire_s, load * ones, 0 * ones, 0 * ones)
    execution = execute(
        traces,
        comm_ops,
        Costs(records, times, slowdown, *([on_one_stream] if scripts[0].traced.device == "cpu" else [])),
        conditions,
    )
    hosts = {host.rank: host for host in execution.hosts}
    return (
        comm_ops,
        execution,
        {rank: intervals_of(trace, comm_ops, execution, hosts[rank]) for rank, trace in traces.traces.items()},
    )


def moments(*scripts: Script) -> dict[int, RecordIntervals]:
    return execute_scripts(all_of(*scripts), scripts)[2]
