"""Steps of a pipeline made by hand: forwards and backwards with gathers next to them, messages between stages, an
optimizer, and memory that fills and empties; what reports are tested with.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import Action
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.trace.timeline import MemoryCurve, SpanKind, Spans, TensorRole, Timeline, TimelineSource

NAMES = (
    "aten.mm.default",
    "aten.mul.Tensor",
    "c10d._allgather_base_.default",
    "c10d.send.default",
    "c10d.recv_.default",
)
MATMUL, MULTIPLY, GATHER, SEND, RECEIVE = range(len(NAMES))
SCOPES = ("layers.0", "layers.1", "norm")
PHASES = ("forward", "backward", "optimizer")
AXES = ("fsdp", "pp")
MATMUL_S, MULTIPLY_S, GATHER_S, MESSAGE_S = 4e-3, 1e-3, 6e-3, 5e-4
MIB = 2**20


def simulated_step(num_ranks: int = 4, num_microbatches: int = 8, num_ops: int = 2, multiplicity: int = 2) -> Timeline:
    """Return a step of a 1F1B pipeline whose every action has `num_ops` matmuls, each with a product after it."""
    schedule = build_schedule(Layout(pp=num_ranks), num_microbatches)
    actions = tuple(dict.fromkeys(str(one) for order in schedule.actions for one in order))
    rows: list[dict[str, float]] = []
    now = [0.0] * num_ranks
    done: dict[Action, float] = {}
    left = [list(order) for order in schedule.actions]
    while any(left):
        for rank, order in enumerate(left):
            if order and (ready := _ready_s(order[0], done, num_ranks)) is not None:
                action = order.pop(0)
                start = max(now[rank], ready)
                now[rank] = done[action] = _run(rows, rank, start, num_ops, action, actions.index(str(action)))
    for rank in range(num_ranks):
        now[rank] = _optimize(rows, rank, now[rank])
    ranks = tuple(rank * multiplicity for rank in range(num_ranks))
    spans = _spans(rows, np.array(ranks))
    return Timeline(
        source=TimelineSource(kind="simulated", name="job.toml", world_size=num_ranks * multiplicity),
        step_s=max(now),
        ranks=ranks,
        multiplicity=(multiplicity,) * num_ranks,
        names=NAMES,
        scopes=SCOPES,
        phases=PHASES,
        actions=actions,
        axes=AXES,
        spans=spans,
        memory=tuple(_memory(rank, max(now), num_microbatches * 50) for rank in ranks),
    )


def _ready_s(action: Action, done: dict[Action, float], num_ranks: int) -> float | None:
    if action.kind == "F":
        return 0.0 if action.stage == 0 else _after(done.get(Action("F", action.stage - 1, action.microbatch)))
    if action.stage == num_ranks - 1:
        return done.get(Action("F", action.stage, action.microbatch))
    return _after(done.get(Action("B", action.stage + 1, action.microbatch)))


def _after(sent_s: float | None) -> float | None:
    return None if sent_s is None else sent_s + MESSAGE_S


def _run(rows: list[dict[str, float]], rank: int, start_s: float, num_ops: int, action: Action, place: int) -> float:
    """Add the spans of one action, and return when it ends."""
    common = {"rank": rank, "phase": int(action.kind == "B"), "action": place}
    # The first gather is exposed by what it takes longer than the operations that hide the others.
    rows.append(_span(common, 1, start_s, GATHER_S, SpanKind.COMMUNICATION, GATHER))
    rows.append(_span(common, 0, start_s, GATHER_S, SpanKind.WAIT, GATHER))
    now = start_s + GATHER_S
    for _ in range(num_ops * (2 if action.kind == "B" else 1)):
        for name, seconds in ((MATMUL, MATMUL_S), (MULTIPLY, MULTIPLY_S)):
            rows.append(_span(common, 0, now, seconds, SpanKind.COMPUTE, name))
            now += seconds
    rows.append(_span(common, 2, now, MESSAGE_S, SpanKind.COMMUNICATION, SEND))
    return now


def _optimize(rows: list[dict[str, float]], rank: int, start_s: float) -> float:
    common = {"rank": rank, "phase": 2, "action": -1}
    rows.append(_span(common, 0, start_s, 10 * MULTIPLY_S, SpanKind.COMPUTE, MULTIPLY))
    return start_s + 10 * MULTIPLY_S


def _span(common: dict[str, int], stream: int, start_s: float, took_s: float, kind: int, name: int) -> dict[str, float]:
    axis = {GATHER: 0, SEND: 1, RECEIVE: 1}.get(name, -1)
    times = {"start_s": start_s, "end_s": start_s + took_s}
    return common | times | {"stream": stream, "kind": kind, "name": name, "axis": axis, "num_bytes": MIB}


def _spans(rows: list[dict[str, float]], ranks: np.ndarray) -> Spans:
    rows.sort(key=lambda row: (row["rank"], row["start_s"]))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    whole = {name: values if name.endswith("_s") else values.astype(np.int64) for name, values in columns.items()}
    whole["rank"] = ranks[whole["rank"]]
    whole["scope"] = np.arange(len(rows)) % len(SCOPES)
    whole["record"] = np.arange(len(rows))
    return Spans(**{field.name: whole[field.name] for field in fields(Spans)})


def _memory(rank: int, step_s: float, num_moments: int) -> MemoryCurve:
    """Return memory that rises to its peak in the middle of the step and falls again."""
    at_s = np.linspace(0, step_s, num_moments, endpoint=False)
    by_role = np.zeros((num_moments, len(TensorRole)), np.int64)
    by_role[:, TensorRole.PARAMETER] = 3000 * MIB
    by_role[:, TensorRole.OPTIMIZER_STATE] = 6000 * MIB
    hill = 1 - np.abs(np.linspace(-1, 1, num_moments))
    by_role[:, TensorRole.ACTIVATION] = (hill * 20_000).astype(np.int64) * MIB
    by_role[:, TensorRole.TEMPORARY] = (np.arange(num_moments) % 7) * 100 * MIB
    allocated = by_role.sum(1)
    reserved = np.maximum.accumulate(allocated) + 500 * MIB
    return MemoryCurve(rank, at_s, by_role, allocated, reserved, np.arange(num_moments))
