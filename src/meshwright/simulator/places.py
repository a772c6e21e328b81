"""place_of(): a record of a trace in the words that a problem needs."""

from __future__ import annotations

from meshwright.spec.problem import Place
from meshwright.spec.trace import NONE, RecordKind, Trace


def place_of(trace: Trace, record: int, axis: str = "") -> Place:
    """Return where a record stands; of -1, that there is none."""
    rank = trace.traced.rank
    if record == NONE:
        return Place(rank=rank, record=NONE, op="")
    row = trace.records
    signature = int(row.signature[record])
    group, action = int(row.group[record]), int(row.action[record])
    shapes = () if signature == NONE else (*trace.signatures[signature].inputs, *trace.signatures[signature].outputs)
    kind = RecordKind(int(row.kind[record])).name.lower().replace("_", " ")
    return Place(
        rank=rank,
        record=record,
        op=kind if signature == NONE else trace.signatures[signature].op,
        scope=trace.scopes[row.scope[record]],
        phase=trace.phases[row.phase[record]],
        action="" if action == NONE else trace.actions[action],
        axis=axis or ("" if group == NONE else trace.group_names[group]),
        num_bytes=int(row.num_bytes[record]),
        dtype=shapes[0].dtype if shapes else "",
    )
