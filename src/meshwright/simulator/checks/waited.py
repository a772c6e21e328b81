"""waited_records(): which collective or message each wait of a trace is for."""

from __future__ import annotations

import numpy as np

from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace


def waited_records(trace: Trace) -> Ints:
    """Return for each wait the record of the collective or message that it is for; -1 of anything else [records]."""
    records = trace.records
    waited = np.full(len(records), NONE, np.int64)
    of_work: dict[int, int] = {}
    of_event: dict[int, int] = {}
    last_of_stream: dict[int, int] = {}
    is_quiet = (records.kind == RecordKind.OP) & (records.stream == 0)
    rows, kinds = np.flatnonzero(~is_quiet), list(RecordKind)
    columns = (rows, records.kind[rows], records.stream[rows], records.work[rows], records.event[rows])
    for row, number, stream, work, event in zip(*(column.tolist() for column in columns), strict=True):
        kind = kinds[number]
        if kind is RecordKind.WAIT:
            last_of_stream[stream] = waited[row] = of_work.get(work, NONE)
        elif kind is RecordKind.WAIT_EVENT:
            waited[row] = of_event.get(event, NONE)
        elif kind is RecordKind.RECORD_EVENT:
            of_event[event] = last_of_stream.get(stream, NONE)
        elif kind is RecordKind.OP:
            last_of_stream[stream] = NONE
        elif kind is not RecordKind.HOST_SYNC:
            of_work[work] = row
    return waited
