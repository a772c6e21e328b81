"""trace_job(): the steps of all ranks of a job, extrapolated from as few traced ranks and microbatches as possible."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from meshwright.config.load import ResolvedJob
from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.log import logger
from meshwright.simulator.engine.rank_classes import first_of_label, mesh_groups, with_groups_of
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.trace.trace import Ints, Trace
from meshwright.spec.trace.trace_order import first_difference
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.extrapolate.chunks import NotExtrapolable
from meshwright.tracer.extrapolate.rank_labels import Classes, class_labels, token_labels
from meshwright.tracer.extrapolate.routing import DifferentPrograms, LoadInterpolation, rows_arriving
from meshwright.tracer.extrapolate.trace_cache import TraceCache
from meshwright.tracer.programs.job_steps import JobSteps, StepBuilder, job_steps
from meshwright.tracer.programs.trace_ranks import DeviceType, Program


@dataclass(frozen=True)
class TraceOptions:
    """How a job is traced."""

    mode: Literal["extrapolated", "whole"] = "extrapolated"
    """Whether a subset of microbatches is traced and the rest extrapolated, or all are traced."""
    classes: Classes = "largest"
    verify: int = 0
    """Further ranks to trace, whose steps must equal those of the representatives of their classes."""
    routing: str = "balanced"
    use_cache: bool = True
    num_processes: int = 2
    """Ranks that are traced at a time; each takes about half a GiB."""


DEFAULT = TraceOptions()
_NUM_ENDS = 2


def trace_job(
    build: StepBuilder,
    resolved: ResolvedJob,
    num_ranks: int | None = None,
    *,
    device: DeviceType = "simgpu",
    how: TraceOptions = DEFAULT,
) -> Traces:
    """Return the traces of one step of a job, as `build` builds it, on `num_ranks` ranks or as many as it names itself.

    Raises ConfigError for a job without a number of ranks, UnsupportedError with the program's error where a rank
    cannot be traced, and MeshwrightError where two ranks of one class differ.
    """
    if resolved.job.optimizer.state_dtype == "int8":
        raise UnsupportedError(
            'optimizer.state_dtype = "int8": the update that torchao compiles is not traced, so this job is planned '
            'and trained but not simulated: simulate it with "bfloat16"'
        )
    steps = job_steps(build, resolved, num_ranks)
    program = Program(build.whole, steps.layout.num_ranks, device=device, routing=how.routing)
    cache = TraceCache.of(steps.job, steps.layout, steps.schedule, device, how.routing) if how.use_cache else None
    traces = _Tracer(steps, program, how, cache).traces()
    _Tracer(steps, program, how).verify(traces)
    return traces


class _Tracer:
    """Traces the representatives of all ranks of a job."""

    def __init__(self, steps: JobSteps, program: Program, how: TraceOptions, cache: TraceCache | None = None) -> None:
        self.steps, self.program, self.how, self.cache = steps, program, how, cache
        self._size = steps.layout.num_ranks // steps.layout.pp

    def traces(self) -> Traces:
        num_ranks = self.steps.layout.num_ranks
        firsts = range(0, num_ranks, self._size)
        rows = self._rows_arriving()
        alike = first_of_label(token_labels(self.steps.layout, rows))
        wanted = {first + place for first in firsts for place in alike.tolist()}
        found = self._traced(wanted) if rows is None else self._loaded(sorted(wanted), rows)
        class_of_rank = np.concatenate([first + alike for first in firsts])
        if self.how.classes == "all":
            class_of_rank = np.concatenate([first + first_of_label(self._labels(found[first])) for first in firsts])
            found |= self._traced(set(class_of_rank.tolist()) - set(found))
            found = {rank: found[rank] for rank in np.unique(class_of_rank).tolist()}
        return Traces(num_ranks, found, class_of_rank)

    def _loaded(self, wanted: list[int], rows: Sequence[int]) -> dict[int, Trace]:
        """Return the steps of `wanted`, whose experts receive `rows` by position along ep.

        Of each pipeline rank the first and the last are traced, the others interpolated.
        """
        by_stage = [list(ranks) for _, ranks in groupby(wanted, lambda rank: rank // self._size)]
        found = self._traced(rank for ranks in by_stage for rank in (ranks[0], ranks[-1]))
        for ranks in by_stage:
            arriving = [rows[rank // self.steps.layout.etp % self.steps.layout.ep] for rank in ranks]
            try:
                found |= _between(found, ranks, arriving)
            except DifferentPrograms as error:
                logger.info("ranks with different numbers of tokens are traced one by one: %s", error)
                found |= self._traced(ranks[1:-1])
        return found

    def _rows_arriving(self) -> tuple[int, ...] | None:
        """Return the rows that each position along ep receives per microbatch; None if unknown."""
        layout, routing = self.steps.layout, self.how.routing
        architecture = resolve_architecture(self.steps.job.model)
        if layout.ep == 1 or routing == "balanced":
            return (1,) * layout.ep
        if not isinstance(architecture, MoEArchitecture):
            return None
        per_token = architecture.experts_per_token
        num_tokens = layout.microbatch_size * self.steps.job.train.seq_len
        num_tokens //= layout.cp * (layout.tp if layout.etp == 1 else 1)
        most = num_tokens * min(per_token, architecture.num_experts // layout.ep)
        return rows_arriving(routing, num_tokens * per_token, layout.ep, most)

    def verify(self, traces: Traces) -> None:
        """Raise MeshwrightError unless how.verify further ranks equal their representatives."""
        for rank in self._others(traces):
            source = int(traces.class_of_rank[rank])
            difference = first_difference(traces.traces[source], self._traced([rank])[rank])
            if difference is not None:
                raise MeshwrightError(
                    f"ranks {source} and {rank} are of one class, but {difference}: the program distinguishes them: "
                    "trace them one by one (--every-rank)"
                )

    def _others(self, traces: Traces) -> list[int]:
        """Return the ranks to verify: not traced, and with shards as large as their representative's."""
        labels = {rank: self._labels(trace) for rank, trace in traces.traces.items() if rank % self._size == 0}
        ranks = np.arange(traces.world_size)
        label = np.concatenate([labels[first] for first in sorted(labels)])
        same = label[ranks] == label[traces.class_of_rank]
        others = ranks[same & (traces.class_of_rank != ranks)]
        count = min(self.how.verify, len(others))
        return others[np.linspace(len(others) - 1, 0, count).astype(np.int64)].tolist() if count else []

    def _labels(self, trace: Trace) -> Ints:
        return class_labels(trace, self.steps.layout, self.how.routing)

    def _traced(self, ranks: Iterable[int]) -> dict[int, Trace]:
        wanted = sorted(ranks)
        if not wanted:
            return {}
        if self.how.mode == "extrapolated" and self.steps.chosen is not None:
            try:
                return self.steps.extrapolated(wanted, self.program, self.how.num_processes, self.cache)
            except NotExtrapolable as error:
                logger.info("all microbatches are traced, since a subset cannot be extrapolated: %s", error)
        return self.steps.whole(wanted, self.program, self.how.num_processes, self.cache)


def _between(found: Mapping[int, Trace], ranks: Sequence[int], rows: Sequence[int]) -> dict[int, Trace]:
    """Return the steps of the ranks between the first and the last, by load."""
    if len(ranks) <= _NUM_ENDS:
        return {}
    heavy = found[ranks[0]]
    loaded = LoadInterpolation(heavy, found[ranks[-1]], (rows[0], rows[-1]))
    steps = {rank: loaded.between(arriving) for rank, arriving in zip(ranks[1:-1], rows[1:-1], strict=True)}
    axes = [mesh_groups(group, heavy.traced.world_size) for group in heavy.groups]
    return {rank: with_groups_of(step, rank, axes) for rank, step in steps.items()}
