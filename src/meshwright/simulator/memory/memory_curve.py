"""A rank's device memory over its step, from a model of torch's caching allocator, and the role of each storage.

The host allocates and frees in order of the records; a record's memory counts from the record's start, next to the
spans of the timeline. Storages from before the step are allocated first, in their order.

roles_of(): the role of each storage of a traced step, from the records that read and write it:

    gradient          from before the step and accumulated in backward; or made in backward and used by the optimizer
                      or read by FSDP2's reduction of a block's unsharded gradients; or made before backward and
                      all-reduced in place in it, as DDP's buckets from its second step on
    parameter         from before the step, and used in forward, backward or recomputation
    optimizer state   from before the step, and used by the optimizer only
    unsharded parameter
                      written by an all-gather of FSDP2, or copied out of it, in code that torch marks
    activation        made before backward, or in a recomputed forward, and live while some of backward runs; or made by
                      the first part of a split backward and last used by the second
    communication     none of these, and used by a collective or a message
    temporary         none of these, and freed before the step ends

The first match counts. Names of parameters are not used, so that any model's step can be read. Ignored: a buffer or
frozen weight from before the step that is only read counts as a parameter.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.checks.call_sites import COMMUNICATION
from meshwright.simulator.memory.allocator import Allocator
from meshwright.spec.layout.schedule.action import parse_action
from meshwright.spec.trace.timeline import Floats, MemoryCurve, TensorRole
from meshwright.spec.trace.trace import NONE, Ints, Trace


class Totals(NamedTuple):
    """Memory after each allocation and each free, in order, which does not depend on time."""

    allocated_bytes: Ints
    reserved_bytes: Ints


def uncached_totals(trace: Trace) -> Totals:
    """Return the memory of a rank's storages without a caching allocator: allocated and reserved are equal."""
    _, storage, sign = _changes(trace)
    held = np.cumsum(trace.storages.num_bytes[storage] * sign)
    return Totals(held, held)


def cached_totals(trace: Trace, allocator: Allocator) -> Totals:
    """Return the memory of a rank's storages as a caching allocator manages it."""
    _, storage, sign = _changes(trace)
    sizes, streams = trace.storages.num_bytes.tolist(), trace.storages.stream.tolist()
    start: dict[int, int] = {}
    allocated, reserved = [], []
    for one, way in zip(storage.tolist(), sign.tolist(), strict=True):
        if way > 0:
            start[one] = allocator.allocate(sizes[one], streams[one])
        else:
            allocator.free(start.pop(one))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Totals(np.array(allocated, np.int64), np.array(reserved, np.int64))


def memory_of(trace: Trace, start_s: Floats, totals: Totals) -> MemoryCurve:
    """Return the memory of a rank whose records start at `start_s` (nan where a record takes no time)."""
    at, storage, sign = _changes(trace)
    num_bytes = trace.storages.num_bytes[storage] * sign
    by_role = np.zeros((len(at), len(TensorRole)), np.int64)
    by_role[np.arange(len(at)), roles_of(trace)[storage]] = num_bytes
    # A moment is the last change of each record: after the frees before it and its own allocations.
    is_moment = np.append(at[1:] != at[:-1], True)[: len(at)]
    records = at[is_moment]
    began_s = np.concatenate([[0.0], np.fmax.accumulate(np.nan_to_num(start_s, nan=0.0)), [0.0]])
    began_s[-1] = began_s.max()
    return MemoryCurve(
        rank=trace.traced.rank,
        at_s=began_s[records + 1],
        by_role=np.cumsum(by_role, axis=0)[is_moment],
        allocated_bytes=totals.allocated_bytes[is_moment],
        reserved_bytes=totals.reserved_bytes[is_moment],
        record=np.minimum(records, len(trace.records) - 1),
    )


def _changes(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Return the record, the storage, and 1 or -1 of each allocation and free, in order: a record's frees come first,
    since they precede it.
    """
    storages = trace.storages
    taken = np.flatnonzero(storages.num_bytes > 0)
    freed = taken[storages.freed_at[taken] != NONE]
    at = np.concatenate([storages.freed_at[freed], storages.allocated_at[taken]])
    storage = np.concatenate([freed, taken])
    sign = np.repeat(np.array([-1, 1]), [len(freed), len(taken)])
    order = np.lexsort((storage, sign, at))
    return at[order], storage[order], sign[order]


Mask = NDArray[np.bool_]

_GATHERS = "FSDP::all_gather"
_REDUCES = "FSDP::post_backward_reduce"


def roles_of(trace: Trace) -> Ints:
    """Return the TensorRole of each storage [storages]."""
    used_by = trace.uses.record
    writes = trace.uses.writes == 1
    backward, optimizer = in_phase(trace, "backward"), in_phase(trace, "optimizer")
    gathers, reduces = (_in_scope(trace, prefix) for prefix in (_GATHERS, _REDUCES))
    communicates = np.isin(trace.records.kind, COMMUNICATION)

    was_there = trace.storages.allocated_at == NONE
    is_optimized = _any_use(trace, optimizer[used_by])
    is_reduced = _any_use(trace, (reduces & ~communicates)[used_by] & ~writes)
    is_added_to = was_there & _any_use(trace, backward[used_by] & writes)
    is_bucket = _made_in(trace, ~backward) & _any_use(trace, (backward & communicates)[used_by] & writes)
    is_kept = _made_in(trace, ~backward) & _lives_through(trace, backward)
    rules = {
        TensorRole.GRADIENT: is_added_to | is_bucket | (_made_in(trace, backward) & (is_optimized | is_reduced)),
        TensorRole.PARAMETER: was_there & _any_use(trace, ~optimizer[used_by]),
        TensorRole.OPTIMIZER_STATE: was_there & is_optimized,
        TensorRole.UNSHARDED_PARAMETER: _any_use(trace, gathers[used_by] & writes),
        TensorRole.ACTIVATION: is_kept | _waits_for_weights(trace),
        TensorRole.COMMUNICATION: ~was_there & _any_use(trace, communicates[used_by]),
        TensorRole.TEMPORARY: ~was_there & (trace.storages.freed_at != NONE),
    }
    return np.select([*rules.values()], [int(role) for role in rules], int(TensorRole.OTHER)).astype(np.int64)


def live_at(trace: Trace, record: int) -> Ints:
    """Return the storages with memory that are live while a record runs."""
    storages = trace.storages
    is_live = (storages.allocated_at <= record) & ((storages.freed_at == NONE) | (storages.freed_at > record))
    return np.flatnonzero(is_live & (storages.num_bytes > 0))


def first_writers(trace: Trace) -> Ints:
    """Return the record that first wrote to each storage in the step; -1 for those from before the step [storages]."""
    makers, uses = np.full(len(trace.storages), NONE, np.int64), trace.uses
    writes = np.flatnonzero(uses.writes == 1)[::-1]
    makers[uses.storage[writes]] = uses.record[writes]
    return np.where(trace.storages.allocated_at == NONE, NONE, makers)


def in_phase(trace: Trace, name: str) -> Mask:
    """Return whether each record is in the phase `name` [records]."""
    return _of_text(trace.records.phase, [phase == name for phase in trace.phases])


def _in_scope(trace: Trace, prefix: str) -> Mask:
    return _of_text(trace.records.scope, [scope.startswith(prefix) for scope in trace.scopes])


def _of_text(column: Ints, wanted: list[bool]) -> Mask:
    """Return whether each record's column indexes a wanted text; False for -1."""
    return np.asarray(np.array([*wanted, False])[column])


def _any_use(trace: Trace, uses: Mask) -> Mask:
    """Return whether each storage is in any of `uses` [storages]."""
    found = np.zeros(len(trace.storages), np.bool_)
    found[trace.uses.storage[uses]] = True
    return found


def _made_in(trace: Trace, records: Mask) -> Mask:
    """Return whether each storage was made by one of `records` [storages]; False if it is from before the step."""
    return np.asarray(np.append(records, False)[trace.storages.allocated_at])


def _lives_through(trace: Trace, records: Mask) -> Mask:
    """Return whether each storage is live while one of `records` runs [storages]."""
    before = np.append(0, np.cumsum(records))
    freed_at = trace.storages.freed_at
    return np.asarray(before[freed_at] > before[trace.storages.allocated_at + 1])


def _waits_for_weights(trace: Trace) -> Mask:
    """Return whether each storage was made in an input backward and is last used in a weight backward."""
    kinds = [parse_action(action).kind for action in trace.actions]
    to_inputs, to_weights = (_of_text(trace.records.action, [kind == one for kind in kinds]) for one in ("I", "W"))
    last_use = np.full(len(trace.storages), NONE, np.int64)
    np.maximum.at(last_use, trace.uses.storage, trace.uses.record)
    return np.asarray(_made_in(trace, to_inputs) & np.append(to_weights, False)[last_use])
