"""hazards(): the races of all ranks' steps, those between the same two lines of the program together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshwright.simulator.background import in_background
from meshwright.simulator.checks.places import place_of
from meshwright.simulator.checks.races import Race, races_of
from meshwright.spec.trace.problem import Hazard, Place
from meshwright.spec.trace.trace import NONE
from meshwright.spec.trace.traces import Traces


def hazards(traces: Traces) -> tuple[Hazard, ...]:
    """Return tensors that streams and communication use in no defined order; empty where there are none."""
    with hazards_in_background(traces) as found:
        return found()


@contextmanager
def hazards_in_background(traces: Traces) -> Iterator[Callable[[], tuple[Hazard, ...]]]:
    """Yield a function that waits for and returns hazards(traces)."""
    ranks = sorted(traces.traces)
    of_rank = [traces.traces[rank] for rank in ranks]
    with in_background(races_of, of_rank, sum(len(trace.records) for trace in of_rank)) as races:
        yield lambda: _hazards(traces, dict(zip(ranks, races(), strict=True)))


def _hazards(traces: Traces, races: Mapping[int, Sequence[Race]]) -> tuple[Hazard, ...]:
    found: dict[Hashable, dict[int, list[Race]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in races.items():
        trace = traces.traces[rank]
        for race in own:
            places = [place_of(trace, row) for row in (race.first, race.second) if row != NONE]
            found[race.kind, *(_line(place) for place in places)][rank].append(race)
    return tuple(_hazard(traces, places) for places in found.values())


def _hazard(traces: Traces, by_rank: dict[int, list[Race]]) -> Hazard:
    rank, races = next(iter(by_rank.items()))
    first, trace = races[0], traces.traces[rank]
    return Hazard(
        kind=first.kind,
        first=place_of(trace, first.first),
        second=None if first.second == NONE else place_of(trace, first.second),
        count=len(races),
        num_ranks=sum(int((traces.class_of_rank == one).sum()) for one in by_rank),
    )


def _line(place: Place) -> Hashable:
    return place.line or (place.scope, place.op)
