"""Communication ops of gloo in a profile.

gloo's events, on its own threads, record the tensor but neither group nor axis. Those belong to the call, on the
training thread; events and calls with equally many elements come in the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.profiler.chrome_trace import OPERATOR, Event, RankTrace
from meshwright.profiler.communication_op import CommunicationOp, axis_of
from meshwright.profiler.step_location import StepLocations
from meshwright.profiler.torch_operators import trace_name

_GLOO = "gloo:"
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}
"""By the profiler's names of data types; 1 for any other, such as bool."""


def gloo_communications(
    trace: RankTrace, events: Sequence[Event], calls: Sequence[Event], places: StepLocations
) -> list[CommunicationOp]:
    """Return this rank's communication ops in `events`; `calls` are the calls of collectives, in order."""
    open_calls: dict[int, deque[Event]] = defaultdict(deque)
    for call in calls:
        for size in set(_sizes(call.args.get("Input Dims", ()))):
            open_calls[size].append(call)
    ends = _ends_on_threads(events, calls[0].thread if calls else None)
    paired: set[int] = set()
    found = []
    for event in events:
        if event.name.startswith(_GLOO):
            size = max(_sizes(event.args.get("Input Dims", ())), default=0)
            queue = open_calls[size]
            while queue and (id(queue[0]) in paired):
                queue.popleft()
            call = queue.popleft() if queue and queue[0].start_ns <= event.start_ns else event
            paired.add(id(call))
            found.append(_communication(trace, call, event, places, ends.get(id(event), event.end_ns)))
    return found


def _communication(trace: RankTrace, call: Event, event: Event, places: StepLocations, end_ns: int) -> CommunicationOp:
    name = trace_name(call.name)
    description = places.group_description(call.start_ns)
    axis = axis_of(name, description, places.fsdp_mark(call.start_ns), trace.groups)
    group = trace.groups.get(f"mesh_{axis}", tuple(range(trace.world_size)))
    largest = max((*_sizes(call.args.get("Input Dims", ())), *_sizes(event.args.get("Input Dims", ()))), default=0)
    (format_name,) = event.args.get("Input type", [""])[:1] or [""]
    found = CommunicationOp(
        rank=trace.rank,
        name=name,
        axis=axis,
        group=group,
        num_bytes=largest * _ITEM_BYTES.get(format_name, 1),
        place=places.at(call),
        issued_ns=call.start_ns,
        start_ns=event.start_ns,
        end_ns=end_ns,
        stream=1,
    )
    _name_ends(found, call.args, trace.rank)
    return found


def _name_ends(found: CommunicationOp, arguments: Mapping[str, Any], rank: int) -> None:
    """Set the sender and the receiver of a message."""
    what = found.name.split(".")[-1]
    if what in ("send", "recv_"):
        peer = found.group[int(arguments["Concrete Inputs"][2])]
        found.source, found.target = (rank, peer) if what == "send" else (peer, rank)


def _sizes(dims: Any) -> Iterator[int]:
    """Yield the number of elements of each tensor among an event's dims, lists of tensors included."""
    if all(isinstance(dim, int) for dim in dims):
        yield math.prod(dims)
    else:
        for inner in dims:
            yield from _sizes(inner)


def _ends_on_threads(events: Sequence[Event], trains: int | None) -> dict[int, int]:
    """Return the end of each event on gloo's threads, including the copy of its result."""
    ends: dict[int, int] = {}
    last: dict[int, int] = {}
    for event in events:
        if event.thread == trains:
            continue
        if event.name.startswith(_GLOO):
            last[event.thread] = id(event)
        if event.thread in last and (event.category == OPERATOR or event.name.startswith(_GLOO)):
            at = last[event.thread]
            ends[at] = max(ends.get(at, 0), event.end_ns)
    return ends
