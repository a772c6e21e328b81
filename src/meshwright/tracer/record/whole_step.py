"""chunks_of_step(): which traced chunk stands for each chunk of the whole step, in its order.

The first and the last microbatches stand for themselves. All others repeat the second of two that were traced between
them, since what it takes over from the microbatch before it comes from one of its own kind; the first of the others
repeats the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.spec.layout.schedule.action import Action
from meshwright.tracer.extrapolate.chunks import BEFORE, FRAME, INPUT, WAIT, CutTrace, Key, NotAlike
from meshwright.tracer.extrapolate.microbatches import Chosen

_EQUAL = ("kind", "stream", "signature", "scope", "phase", "group", "peer", "num_bytes")


class Instance(NamedTuple):
    """A chunk of the whole step: which traced one it repeats, for which microbatch, and in which action."""

    chunk: int
    microbatch: int | None
    action: str


def require_alike(traced: CutTrace, chosen: Chosen) -> None:
    """Raise NotAlike unless the two microbatches that stand for all others do the same."""
    positions = traced.positions()
    first, second = chosen.steady
    for (key, microbatch), at in positions.items():
        if microbatch != first:
            continue
        pair = [traced.chunks[at], traced.chunks[positions[key, second]]]
        rows = [[getattr(traced.trace.records, name)[one.start : one.stop] for name in _EQUAL] for one in pair]
        made = [made.count for made in (traced.storages, traced.works, traced.events)]
        is_same = all(np.array_equal(a, b) for a, b in zip(*rows, strict=True))
        if not is_same or any(count[at] != count[positions[key, second]] for count in made):
            numbers = " and ".join(str(chosen.microbatches[one]) for one in chosen.steady)
            raise NotAlike(f"microbatches {numbers} differ in {key.kind} of stage {key.stage}")


def chunks_of_step(traced: CutTrace, chosen: Chosen, actions: Sequence[Action]) -> Iterator[Instance]:
    """Yield the chunks of the whole step in order."""
    stages = sorted({action.stage for action in actions})
    orders: dict[Key, list[int]] = {}
    for action in actions:
        orders.setdefault(Key(action.kind, stages.index(action.stage)), []).append(action.microbatch)
    positions, sources = traced.positions(), _Sources(traced, chosen, orders)
    yield Instance(BEFORE, None, "")
    following = _frames(traced)
    if (Key(INPUT, 0), 0) in positions:
        yield from (sources.instance(Key(INPUT, 0), number, "") for number in range(chosen.num_microbatches))
    yield from following.get(BEFORE, [])
    for action in actions:
        one = sources.instance(Key(action.kind, stages.index(action.stage)), action.microbatch, str(action))
        yield one
        yield from following.get(one.chunk, [])
    for action in actions:
        key = Key(f"{WAIT} {action.kind}", stages.index(action.stage))
        # The step waits in the end for the newest messages only.
        if (key, sources.source(key, action.microbatch)) in positions:
            yield sources.instance(key, action.microbatch, "")
    yield from following.get(len(traced.chunks), [])


def _frames(traced: CutTrace) -> dict[int, list[Instance]]:
    """Return the frames by the chunk that they follow: BEFORE for those before all actions, and those after all waits
    by the number of chunks.
    """
    found: dict[int, list[Instance]] = {}
    last = BEFORE
    for index, chunk in enumerate(traced.chunks):
        if chunk.key.kind == FRAME:
            found.setdefault(last, []).append(Instance(index, None, ""))
        elif chunk.key.kind.startswith(WAIT):
            last = len(traced.chunks)
        elif chunk.key.kind != INPUT:
            last = index
    return found


class _Sources:
    """Which traced chunk stands for a microbatch's."""

    def __init__(self, traced: CutTrace, chosen: Chosen, orders: dict[Key, list[int]]) -> None:
        self._positions = traced.positions()
        self._numbers = {number: index for index, number in enumerate(chosen.microbatches)}
        self._is_first_of_others: dict[Key, int] = {}
        self._order_in_trace: dict[Key, list[int]] = {}
        for chunk in traced.chunks:
            if chunk.microbatch in chosen.steady:
                self._order_in_trace.setdefault(chunk.key, []).append(chunk.microbatch)
        for key in self._order_in_trace:
            order = orders.get(Key(key.kind.removeprefix(f"{WAIT} "), key.stage), range(chosen.num_microbatches))
            self._is_first_of_others[key] = next(one for one in order if self._is_other(one, chosen))
        self._chosen = chosen

    def _is_other(self, microbatch: int, chosen: Chosen) -> bool:
        return self._numbers.get(microbatch, chosen.steady[0]) in chosen.steady

    def source(self, key: Key, microbatch: int) -> int:
        """Return the position of the traced microbatch that stands for `microbatch`, which may have no such chunk."""
        if not self._is_other(microbatch, self._chosen):
            return self._numbers[microbatch]
        first, second = self._order_in_trace.get(key, self._chosen.steady)
        return first if microbatch == self._is_first_of_others.get(key) else second

    def instance(self, key: Key, microbatch: int, action: str) -> Instance:
        source = self.source(key, microbatch)
        if (key, source) not in self._positions:
            raise NotAlike(f"{action} asks nothing of the device")
        return Instance(self._positions[key, source], microbatch, action)
