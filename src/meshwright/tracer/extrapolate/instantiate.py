"""instantiate(): the whole step of a schedule, from a trace of the same step with a subset of its microbatches.

Each chunk of the whole step repeats a traced one (microbatches.py). Storages, works and events that a chunk uses and
did not make belong to its own microbatch, to one of the fixed microbatches, or to the chunk of their kind that ran a
fixed number of chunks before; the same relation holds in the whole step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.layout.schedule.action import Action
from meshwright.spec.trace.trace import NONE, Ints, Records, Storages, Trace, Uses
from meshwright.spec.trace.trace_order import in_order
from meshwright.tracer.extrapolate.chunks import BEFORE, ChunkKey, CutTrace, NotExtrapolable, Producers
from meshwright.tracer.extrapolate.microbatches import Chosen, Instance, chunks_of_step, require_alike


def instantiate(traced: CutTrace, chosen: Chosen, actions: Sequence[Action]) -> Trace:
    """Return the trace of a step of `actions`, sends and receives included; `traced` ran the chosen microbatches.

    Raises NotExtrapolable where the steady microbatches differ.
    """
    require_alike(traced, chosen)
    return _Instantiation(traced, chosen, list(chunks_of_step(traced, chosen, actions))).trace()


@dataclass(frozen=True)
class _Placed:
    """The first own record, storage, work and event of each instance in the whole step."""

    records: Ints
    storages: Ints
    works: Ints
    events: Ints


class _Instantiation:
    def __init__(self, traced: CutTrace, chosen: Chosen, instances: list[Instance]) -> None:
        self.traced, self.chosen, self.instances = traced, chosen, instances
        self.chunk = np.array([one.chunk for one in instances])
        sizes = np.array([chunk.stop - chunk.start for chunk in traced.chunks])
        counts = [sizes, traced.storages.count, traced.works.count, traced.events.count]
        self.first = _Placed(*(np.cumsum(count[self.chunk]) - count[self.chunk] for count in counts))
        self.sizes = sizes
        self._by_name: dict[ChunkKey, dict[int | None, int]] = {}
        self._in_trace: dict[ChunkKey, list[int]] = {}
        for index, chunk in enumerate(traced.chunks):
            self._in_trace.setdefault(chunk.key, []).append(index)
        self._in_step: dict[ChunkKey, list[int]] = {}
        for index, one in enumerate(instances):
            key = traced.chunks[one.chunk].key
            self._in_step.setdefault(key, []).append(index)
            self._by_name.setdefault(key, {})[one.microbatch] = index

    def trace(self) -> Trace:
        records, uses = self.traced.trace.records, self.traced.trace.uses
        rows = self._concatenated([chunk.start for chunk in self.traced.chunks], self.sizes)
        use_edges = np.searchsorted(uses.record, [chunk.start for chunk in self.traced.chunks])
        use_counts = np.searchsorted(uses.record, [chunk.stop for chunk in self.traced.chunks]) - use_edges
        use_rows = self._concatenated(use_edges.tolist(), use_counts)
        columns = {name: column[rows] for name, column in vars(records).items()}
        texts = [one.action for one in self.instances]
        actions = tuple(dict.fromkeys(text for text in texts if text))
        number = {"": NONE} | {text: index for index, text in enumerate(actions)}
        columns["action"] = np.repeat(np.array([number[text] for text in texts]), self.sizes[self.chunk])
        of_row = np.repeat(np.arange(len(self.instances)), self.sizes[self.chunk])
        for name, made, first in (
            ("work", self.traced.works, self.first.works),
            ("event", self.traced.events, self.first.events),
        ):
            columns[name] = self._resolved(columns[name], of_row, made, first)
        of_use = np.repeat(np.arange(len(self.instances)), use_counts[self.chunk])
        shift = self.first.records - np.array([self.traced.chunks[one].start for one in self.chunk])
        whole = Trace(
            traced=self.traced.trace.traced,
            signatures=self.traced.trace.signatures,
            scopes=self.traced.trace.scopes,
            phases=self.traced.trace.phases,
            actions=actions,
            lines=self.traced.trace.lines,
            groups=self.traced.trace.groups,
            group_names=self.traced.trace.group_names,
            records=Records(**columns),
            storages=self._storages(shift),
            uses=Uses(
                uses.record[use_rows] + shift[of_use],
                self._resolved(uses.storage[use_rows], of_use, self.traced.storages, self.first.storages),
                uses.writes[use_rows],
            ),
        )
        return in_order(whole)

    def _concatenated(self, starts: list[int], counts: Ints) -> Ints:
        """Return the rows of all instances, given those of each chunk."""
        begin, count = np.array(starts)[self.chunk], counts[self.chunk]
        return np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))

    def _resolved(self, items: Ints, instance: Ints, made: Producers, first: Ints) -> Ints:
        """Return the numbers in the whole step of items that instances name by their numbers in the trace."""
        is_named = items != NONE
        if not is_named.any():
            return items
        pairs = instance * len(self.traced.chunks) + np.where(is_named, made.chunk[items], BEFORE)
        is_used = np.zeros(len(self.instances) * len(self.traced.chunks), np.bool_)
        is_used[pairs] = True
        distinct = np.flatnonzero(is_used)
        begin = np.empty(len(is_used), np.int64)
        begin[distinct] = first[self._makers(*divmod(distinct, len(self.traced.chunks)))]
        return np.where(is_named, begin[pairs] + made.ordinal[items], NONE)

    def _makers(self, instances: Ints, owners: Ints) -> Ints:
        """Return the instances that correspond to the traced chunks `owners` from the view of `instances`."""
        kinds, where = np.unique(self.chunk[instances] * len(self.traced.chunks) + owners, return_inverse=True)
        rows = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where))[:-1])
        makers = np.empty(len(instances), np.int64)
        for kind, of_kind in zip(kinds.tolist(), rows, strict=True):
            chunk, owner = divmod(kind, len(self.traced.chunks))
            makers[of_kind] = self._makers_of(chunk, owner, instances[of_kind])
        return makers

    def _makers_of(self, chunk: int, owner: int, instances: Ints) -> Ints | list[int] | int:
        """Return the same for `instances` that all repeat `chunk`."""
        made = self.traced.chunks[owner]
        if owner == chunk:
            return instances
        if made.microbatch is None:
            return self._in_step[made.key][0]
        named = self._by_name[made.key]
        if made.microbatch == self.traced.chunks[chunk].microbatch:
            return [named[self.instances[one].microbatch] for one in instances.tolist()]
        if made.microbatch not in self.chosen.steady:
            return named[self.chosen.microbatches[made.microbatch]]
        return self._as_many_before(chunk, owner, instances)

    def _as_many_before(self, chunk: int, owner: int, instances: Ints) -> Ints:
        key = self.traced.chunks[owner].key
        in_trace, in_step = self._in_trace[key], np.array(self._in_step[key])
        ago = sum(at < chunk for at in in_trace) - in_trace.index(owner)
        before = np.searchsorted(in_step, instances)
        if ago <= 0 or (before < ago).any():
            raise NotExtrapolable(f"a chunk uses an item of a later {key.kind} of stage {key.stage}")
        return np.asarray(in_step[before - ago])

    def _storages(self, shift: Ints) -> Storages:
        source = self.traced.trace.storages
        counts = self.traced.storages.count
        by_chunk = np.argsort(self.traced.storages.chunk, kind="stable")
        rows = by_chunk[self._concatenated((np.cumsum(counts) - counts).tolist(), counts)]
        of_row = np.repeat(np.arange(len(self.instances)), counts[self.chunk])
        allocated = np.where(of_row == 0, NONE, source.allocated_at[rows] + shift[of_row])
        freed = self._freed(rows, shift)
        return Storages(source.num_bytes[rows], allocated, freed, source.stream[rows])

    def _freed(self, rows: Ints, shift: Ints) -> Ints:
        """Return the record before which each storage is freed; `rows` are the traced storages that they repeat.

        A free belongs to the chunk of the record before it: a function frees its last storages when it returns.
        """
        freed_at = self.traced.trace.storages.freed_at
        freeing = np.where(freed_at == NONE, NONE, self.traced.chunk_of_record[np.maximum(freed_at - 1, 0)])
        result = np.full(len(rows), NONE, np.int64)
        together = self._freed_together(freeing)
        freed_in = [np.flatnonzero((freeing == chunk) & ~together) for chunk in range(len(self.traced.chunks))]
        items = np.concatenate([freed_in[one.chunk] for one in self.instances])
        instance = np.repeat(np.arange(len(self.instances)), [len(freed_in[one.chunk]) for one in self.instances])
        targets = self._resolved(items, instance, self.traced.storages, self.first.storages)
        if (np.bincount(targets) > 1).any():
            again = np.setdiff1d(np.arange(len(targets)), np.unique(targets, return_index=True)[1])[0]
            raise NotExtrapolable(f"{self.traced.chunks[self.chunk[instance[again]]].key.kind} frees a storage twice")
        result[targets] = freed_at[items] + shift[instance]
        for target in np.flatnonzero((result == NONE) & (freed_at[rows] != NONE)).tolist():
            item = rows[target]
            chunk = self.traced.chunks[freeing[item]]
            if not together[item]:
                raise NotExtrapolable(f"a storage of {chunk.key.kind} of stage {chunk.key.stage} is never freed")
            number = None if chunk.microbatch is None else self.chosen.microbatches[chunk.microbatch]
            result[target] = freed_at[item] + shift[self._by_name[chunk.key][number]]
        return result

    def _freed_together(self, freeing: Ints) -> NDArray[np.bool_]:
        """Return which storages one chunk frees for all microbatches, such as their inputs after the last one."""
        made, positions = self.traced.storages, self.traced.positions()
        result = np.zeros(len(freeing), np.bool_)
        for (key, microbatch), chunk in positions.items():
            if microbatch != self.chosen.steady[0]:
                continue
            first, second = (
                np.flatnonzero(made.chunk == one) for one in (chunk, positions[key, self.chosen.steady[1]])
            )
            same = (freeing[first] == freeing[second]) & (freeing[first] != NONE)
            result[first[same]] = result[second[same]] = True
        return result
