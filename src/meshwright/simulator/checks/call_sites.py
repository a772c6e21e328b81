"""call_site_of(): a record of a trace as a CallSite for messages; ordinals, lists of ranks and scopes as text."""

import re

import numpy as np

from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.trace_problem import CallSite

COMMUNICATION = (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE)


def call_site_of(trace: Trace, record: int, axis: str = "") -> CallSite:
    """Return the CallSite of a record; for -1, of a rank without any record."""
    rank = trace.traced.rank
    if record == NONE:
        return CallSite(rank=rank, record=NONE, op="")
    row = trace.records
    line = int(row.line[record])
    signature = int(row.signature[record])
    group, action = int(row.group[record]), int(row.action[record])
    shapes = () if signature == NONE else (*trace.signatures[signature].inputs, *trace.signatures[signature].outputs)
    kind = RecordKind(int(row.kind[record])).name.lower().replace("_", " ")
    return CallSite(
        rank=rank,
        record=record,
        op=kind + _waited_for(trace, record) if signature == NONE else trace.signatures[signature].op,
        agreed="" if signature == NONE else trace.signatures[signature].agreed,
        line="" if line == NONE else trace.lines[line],
        scope=trace.scopes[row.scope[record]],
        phase=trace.phases[row.phase[record]],
        action="" if action == NONE else trace.actions[action],
        axis=axis or ("" if group == NONE else trace.group_names[group]),
        num_bytes=int(row.num_bytes[record]),
        dtype=shapes[0].dtype if shapes else "",
    )


def missing_call_site(trace: Trace, rows: Ints) -> CallSite:
    """Return the CallSite of a rank that runs nothing after `rows`, its operations of a channel: their last, or the
    last communication op of its step, if any.
    """
    if not len(rows):
        rows = np.flatnonzero(np.isin(trace.records.kind, COMMUNICATION))
    if not len(rows):
        return call_site_of(trace, NONE)
    return call_site_of(trace, int(rows[-1])).replace(record=NONE)


def ordinal(number: int) -> str:
    """Return the ordinal of a position counted from 0, such as "1st" for 0."""
    place = number + 1
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending}"


def some_ranks(ranks: tuple[int, ...]) -> str:
    """Return such as "0, 1, 2, ... and 511"."""
    if len(ranks) <= 4:
        return " and ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])] if len(ranks) > 1 else [str(ranks[0])])
    return f"{', '.join(map(str, ranks[:3]))}, ... and {ranks[-1]}"


def _waited_for(trace: Trace, record: int) -> str:
    """Return the operation that a wait waits for, if it is in the same step."""
    records = trace.records
    if records.kind[record] != RecordKind.WAIT or records.work[record] == NONE:
        return ""
    is_source = (records.work == records.work[record]) & (records.signature != NONE)
    source = int(is_source.argmax())
    return f" for {trace.signatures[int(records.signature[source])].op}" if is_source.any() else ""


_NUMBER = re.compile(r"\d+")
_LINE = re.compile(r"\.py:\d+$")


def without_numbers(scope: str) -> str:
    """Return a scope with * for numbers, such as h.*.mlp, so that equal blocks share it; train2.py:40 is unchanged."""
    return scope if _LINE.search(scope) else _NUMBER.sub("*", scope)
