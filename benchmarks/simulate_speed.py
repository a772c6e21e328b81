"""python -m benchmarks.simulate_speed: how many records a second does the simulator execute, on one core?

Writes by hand the traces of 16 pipeline ranks of a job of the size of Llama 3 405B on 16,384 devices (32 microbatches,
8 blocks a stage, tensor-parallel collectives with their waits, FSDP's gathers on streams of their own) and simulates
the step on H100s, class by class. Times are the processor's, the least of some tries.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.engine.execute import execute
from meshwright.simulator.engine.matching import match
from meshwright.simulator.simulate_step import device_model, simulate
from meshwright.spec.trace.trace import NONE, RecordKind, Records, Signature, Storages, TensorShape, Trace, Traced, Uses
from meshwright.spec.trace.traces import Traces

WORLD_SIZE, NUM_STAGES, TP = 16_384, 16, 8
_NUM_MICROBATCHES, _NUM_BLOCKS, _OPS_BETWEEN = 32, 8, 12
_RESIDUAL_BYTES = 8192 * 16_384 * 2
_MATMUL, _GATHER, _SCATTER, _SEND, _RECEIVE = range(5)
_COLUMNS = ("kind", "stream", "signature", "scope", "phase", "action", "group", "peer", "num_bytes", "work", "event")


def main() -> None:
    """Print records a second of the engine, and of all that simulate() does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=3)
    tries = parser.parse_args().tries
    cluster = load_cluster("h100-ib400").with_num_devices(WORLD_SIZE)
    traces = big_step()
    num_records = sum(len(trace.records) for trace in traces.traces.values())
    comm_ops = match(traces)
    costs = device_model(cluster).costs(traces, comm_ops)
    engine_s = min(_cpu_s(lambda: execute(traces, comm_ops, costs)) for _ in range(tries))
    whole_s = min(_cpu_s(lambda: simulate(traces, cluster)) for _ in range(tries))
    print(f"{num_records:,} records of {NUM_STAGES} ranks that stand for {WORLD_SIZE:,}")
    print(f"engine     {engine_s:6.2f} s  {num_records / engine_s:>12,.0f} records/s")
    print(f"simulate() {whole_s:6.2f} s  {num_records / whole_s:>12,.0f} records/s")


def big_step() -> Traces:
    """Return the traces of all pipeline ranks."""
    width = WORLD_SIZE // NUM_STAGES
    traces = {stage * width: _stage(stage, width) for stage in range(NUM_STAGES)}
    return Traces(WORLD_SIZE, traces, np.arange(WORLD_SIZE) // width * width)


def _cpu_s(call: object) -> float:
    start_s = time.process_time()
    assert callable(call)
    call()
    return time.process_time() - start_s


class _Rows:
    """Collects records."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.num_works = self.num_events = 0

    def add(self, kind: RecordKind, stream: int = 0, **columns: int) -> None:
        row = dict.fromkeys(_COLUMNS, NONE) | {"scope": 0, "phase": 0, "num_bytes": 0, "kind": kind, "stream": stream}
        self.rows.append(tuple((row | columns).values()))

    def meet(self, kind: RecordKind, stream: int = 0, **columns: int) -> int:
        self.num_works += 1
        self.add(kind, stream, work=self.num_works, **columns)
        return self.num_works

    def enqueue(self, source: int, target: int) -> None:
        """Let one stream wait for another."""
        self.num_events += 1
        self.add(RecordKind.RECORD_EVENT, source, event=self.num_events)
        self.add(RecordKind.WAIT_EVENT, target, event=self.num_events)


def _stage(stage: int, width: int) -> Trace:
    rows, rank = _Rows(), stage * width
    for _ in range(2):
        for _ in range(_NUM_MICROBATCHES):
            _pass(rows, rank, stage, width)
    columns = np.array(rows.rows, np.int64).T
    order = dict.fromkeys(_COLUMNS, NONE) | {"scope": 0, "phase": 0, "num_bytes": 0, "kind": 0, "stream": 0}
    empty = np.zeros(0, np.int64)
    return Trace(
        traced=Traced(build="benchmark:step", rank=rank, world_size=WORLD_SIZE, torch_version="2"),
        signatures=_signatures(),
        scopes=("block",),
        phases=("forward",),
        actions=(),
        groups=(
            tuple(range(rank, rank + TP)),
            tuple(range(rank, rank + width, TP)),
            tuple(range(0, WORLD_SIZE, width)),
        ),
        group_names=("tp", "fsdp", "pp"),
        records=Records(**dict(zip(order, columns, strict=True))),
        storages=Storages(empty, empty, empty, empty),
        uses=Uses(empty, empty, empty),
    )


def _pass(rows: _Rows, rank: int, stage: int, width: int) -> None:
    """Add a microbatch's pass through a stage; the way back is execution as another way there."""
    if stage > 0:
        work = rows.meet(RecordKind.RECEIVE, signature=_RECEIVE, group=2, peer=rank - width, num_bytes=1 << 25)
        rows.add(RecordKind.WAIT, work=work)
    for _ in range(_NUM_BLOCKS):
        rows.enqueue(0, 2)
        work = rows.meet(RecordKind.COLLECTIVE, 2, signature=_GATHER, group=1, num_bytes=1 << 27)
        rows.add(RecordKind.WAIT, 2, work=work)
        for signature in (_GATHER, _SCATTER, _GATHER, _SCATTER):
            for _ in range(_OPS_BETWEEN):
                rows.add(RecordKind.OP, signature=_MATMUL)
            work = rows.meet(RecordKind.COLLECTIVE, signature=signature, group=0, num_bytes=_RESIDUAL_BYTES)
            rows.add(RecordKind.WAIT, work=work)
        rows.enqueue(2, 0)
    if stage < NUM_STAGES - 1:
        rows.meet(RecordKind.SEND, signature=_SEND, group=2, peer=rank + width, num_bytes=1 << 25)


def _signatures() -> tuple[Signature, ...]:
    left, right, out = ((8192, 2048), (2048, 16_384), (8192, 16_384))
    one, two, made = (TensorShape(dtype="bfloat16", dims=dims) for dims in (left, right, out))
    names = (
        "c10d._allgather_base_.default",
        "c10d._reduce_scatter_base_.default",
        "c10d.send.default",
        "c10d.recv_.default",
    )
    matmul = Signature(op="aten.mm.default", inputs=(one, two), outputs=(made,), flops=2 * 8192 * 2048 * 16_384)
    return matmul, *(Signature(op=name, inputs=(one,), outputs=(one,)) for name in names)


if __name__ == "__main__":
    main()
