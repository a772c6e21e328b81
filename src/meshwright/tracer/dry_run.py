"""trace_job(): what all ranks of a job do in one step, from as few traced ranks and microbatches as tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.log import logger
from meshwright.spec.model_source import resolve_architecture
from meshwright.spec.trace import Ints, Trace
from meshwright.spec.trace_order import first_difference
from meshwright.spec.traces import Traces
from meshwright.tracer.cache import TraceCache
from meshwright.tracer.chunks import NotAlike
from meshwright.tracer.classes import Classes, class_labels, token_labels
from meshwright.tracer.job_steps import WHOLE, JobSteps, job_steps
from meshwright.tracer.trace import DeviceType, Program


@dataclass(frozen=True)
class How:
    """How a job is traced."""

    mode: Literal["told", "whole"] = "told"
    """Whether few microbatches are traced and tell the rest, or all of them are."""
    classes: Classes = "largest"
    verify: int = 0
    """Ranks that are traced besides, and must do what the representatives of their classes do."""
    routing: str = "balanced"
    use_cache: bool = True
    num_processes: int = 2
    """Ranks that are traced at a time; each takes about half a GiB."""


DEFAULT = How()


def trace_job(
    job_file: str,
    overrides: Sequence[str] = (),
    num_ranks: int | None = None,
    *,
    device: DeviceType = "simgpu",
    how: How = DEFAULT,
) -> Traces:
    """Return the traces of one step of a job on `num_ranks` ranks, or on as many as it names itself.

    Raises ConfigError for a job that names no number of ranks, UnsupportedError with what the program said where a rank
    cannot be traced, and MeshwrightError where two ranks that should do the same do not.
    """
    steps = job_steps(job_file, overrides, num_ranks)
    cache = TraceCache.of(steps, device, how.mode, how.classes, how.routing) if how.use_cache else None
    tracer = _Tracer(steps, Program(WHOLE, steps.layout.num_ranks, device=device, routing=how.routing), how)
    traces = cache.load() if cache else None
    if traces is None:
        traces = tracer.traces()
        if cache:
            cache.save(traces)
    tracer.verify(traces)
    return traces


class _Tracer:
    """Traces what stands for all ranks of a job."""

    def __init__(self, steps: JobSteps, program: Program, how: How) -> None:
        self.steps, self.program, self.how = steps, program, how
        self._size = steps.layout.num_ranks // steps.layout.pp

    def traces(self) -> Traces:
        num_ranks = self.steps.layout.num_ranks
        firsts = range(0, num_ranks, self._size)
        by_tokens = token_labels(self.steps.layout, self.how.routing, self._experts_per_token())
        alike = _first_alike(by_tokens)
        found = self._traced({first + place for first in firsts for place in alike.tolist()})
        class_of_rank = np.concatenate([first + alike for first in firsts])
        if self.how.classes == "all":
            class_of_rank = np.concatenate([first + _first_alike(self._labels(found[first])) for first in firsts])
            found |= self._traced(set(class_of_rank.tolist()) - set(found))
        return Traces(num_ranks, found, class_of_rank)

    def verify(self, traces: Traces) -> None:
        """Raise MeshwrightError unless how.verify other ranks, far apart, do what the traces say."""
        for rank in self._others(traces):
            source = int(traces.class_of_rank[rank])
            difference = first_difference(traces.traces[source], self._traced([rank])[rank])
            if difference is not None:
                raise MeshwrightError(
                    f"ranks {source} and {rank} should do the same step, but {difference}: "
                    "the program treats ranks differently; trace them one by one"
                )

    def _others(self, traces: Traces) -> list[int]:
        """Return the ranks to verify: none that was traced, and none with smaller shards than its representative."""
        labels = {rank: self._labels(trace) for rank, trace in traces.traces.items() if rank % self._size == 0}
        ranks = np.arange(traces.world_size)
        label = np.concatenate([labels[first] for first in sorted(labels)])
        same = label[ranks] == label[traces.class_of_rank]
        others = ranks[same & (traces.class_of_rank != ranks)]
        count = min(self.how.verify, len(others))
        return others[np.linspace(len(others) - 1, 0, count).astype(np.int64)].tolist() if count else []

    def _experts_per_token(self) -> int:
        architecture = resolve_architecture(self.steps.job.model)
        # Of a model of the user's own nobody knows: any rank may get some.
        return getattr(architecture, "experts_per_token", self.steps.layout.ep)

    def _labels(self, trace: Trace) -> Ints:
        return class_labels(trace, self.steps.layout, self.how.routing)

    def _traced(self, ranks: Iterable[int]) -> dict[int, Trace]:
        wanted = sorted(ranks)
        if not wanted:
            return {}
        if self.how.mode == "told" and self.steps.chosen is not None:
            try:
                return self.steps.told(wanted, self.program, self.how.num_processes)
            except NotAlike as error:
                logger.info("all microbatches are traced, since some do not tell the others: %s", error)
        return self.steps.whole(wanted, self.program, self.how.num_processes)


def _first_alike(labels: Ints) -> Ints:
    """Return for each element the first with the same label."""
    _, first, where = np.unique(labels, return_index=True, return_inverse=True)
    return first[where.ravel()]
