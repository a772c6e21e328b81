"""Traces: what all ranks of a job do in one step. Ranks that do the same share one of them's trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from meshwright.errors import ConfigError
from meshwright.spec.trace.trace import Guess, Ints, Trace


@dataclass(frozen=True)
class Traces:
    """The steps of all ranks of a job; raises ConfigError where they are not all there."""

    world_size: int
    traces: dict[int, Trace]
    """By the rank that was traced, the representative of its class; groups and peers in it are that rank's."""
    class_of_rank: Ints
    """For every rank the representative of its class, its own for a representative [world_size]."""
    earlier: Traces | None = None
    """What the ranks did in the builder and in calls before this one, as Trace.earlier; None where that is unknown."""
    traced: tuple[int, ...] = ()
    """Ranks that were traced, where these are more than the representatives."""

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigError(problem)

    def of_rank(self, rank: int) -> Trace:
        """Return the trace of the rank that does the same as `rank`, or of `rank` itself."""
        return self.traces[int(self.class_of_rank[rank])]

    def guesses(self) -> tuple[Guess, ...]:
        """Return the numbers that decided what some rank runs, though they were guesses; each once."""
        return tuple(dict.fromkeys(guess for _, trace in sorted(self.traces.items()) for guess in trace.guesses))

    @classmethod
    def all_of(cls, traces: Mapping[int, Trace]) -> Self:
        """Return the traces of a job whose every rank was traced."""
        return cls(len(traces), dict(traces), np.array(sorted(traces), np.int64))

    def _problem(self) -> str | None:
        """Return what is wrong, or None."""
        if self.class_of_rank.shape != (self.world_size,):
            return (
                f"{len(self.class_of_rank)} ranks have a class but the job has world_size = {self.world_size}: "
                "give class_of_rank one element for each rank"
            )
        without = sorted(set(np.unique(self.class_of_rank).tolist()) - set(self.traces))
        if without:
            return f"ranks {_some(without)} represent a class but have no trace: trace them"
        own = {rank for rank in range(self.world_size) if self.class_of_rank[rank] == rank}
        strangers = sorted(self.traces.keys() - own)
        if strangers:
            return f"ranks {_some(strangers)} have a trace but are not the representatives of their classes: drop it"
        traced = {rank: (one.traced.rank, one.traced.world_size) for rank, one in sorted(self.traces.items())}
        others = [rank for rank, found in traced.items() if found != (rank, self.world_size)]
        if others:
            one = self.traces[others[0]].traced
            return (
                f"the trace given for rank {others[0]} of {self.world_size} is of rank {one.rank} of "
                f"{one.world_size}: give each rank its own"
            )
        return None


def _some(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:5]) + (", ..." if len(ranks) > 5 else "")
