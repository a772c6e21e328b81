"""memory_of(): a rank's device memory over its step, from a model of torch's caching allocator.

The host allocates and frees in order of the records; a record's memory counts from the record's start, next to the
spans of the timeline. Storages from before the step are allocated first, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.simulator.memory.allocator import Allocator
from meshwright.simulator.memory.roles import roles_of
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
