"""JobSteps: one step of a job on any of its ranks, traced whole or extrapolated from a few microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import Action, read_schedule
from meshwright.spec.layout.schedule.schedule import Schedule, build_schedule, lower
from meshwright.spec.trace.trace import Trace
from meshwright.tracer.extrapolate.chunks import CutTrace, cut
from meshwright.tracer.extrapolate.instantiate import instantiate
from meshwright.tracer.extrapolate.microbatches import (
    Blocks,
    Chosen,
    alike_pipeline_ranks,
    blocks_of_job,
    choose_microbatches,
    relocated,
)
from meshwright.tracer.extrapolate.trace_cache import Part, TraceCache
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks


class StepBuilder(NamedTuple):
    """What builds a job's step, as module:function: a function of (device, rank, world_size, job as JSON, folder in
    which modules that the job names may be) that returns a step, which takes nothing.
    """

    whole: str
    part: str
    """Builds the step of some microbatches; takes them, such as "0,1,2,31", before the job."""


@dataclass(frozen=True)
class JobSteps:
    """A job's step, known without torch."""

    build: StepBuilder
    job: Job
    layout: Layout
    schedule: Schedule
    lowered: list[list[Action]]
    """The actions of each pipeline rank, sends and receives included."""
    chosen: Chosen | None
    """The microbatches from which the step is extrapolated; None to trace all."""
    alike: dict[int, list[int]]
    """By traced pipeline rank the ones that do the same."""
    blocks: Blocks | None
    arguments: tuple[str, ...]
    """Of the builder: the job as JSON, and the folder of its modules."""

    def whole(
        self, ranks: Sequence[int], program: Program, num_processes: int, cache: TraceCache | None = None
    ) -> dict[int, Trace]:
        """Return the steps of `ranks`, each traced with all its microbatches."""
        return _traced("whole", self._program(program, self.build.whole), ranks, num_processes, cache)

    def extrapolated(
        self, ranks: Sequence[int], program: Program, num_processes: int, cache: TraceCache | None = None
    ) -> dict[int, Trace]:
        """Return the steps of `ranks`, extrapolated from a subset of microbatches; raises NotExtrapolable.

        The ranks of pipeline ranks that do the same must stand at the same places in them.
        """
        assert self.chosen is not None
        size = self.layout.num_ranks // self.layout.pp
        sources = {other: rank for rank, others in self.alike.items() for other in others}
        source_of = {rank: sources[rank // size] * size + rank % size for rank in ranks}
        numbers = ",".join(str(number) for number in self.chosen.microbatches)
        part = self._program(program, self.build.part, numbers)
        found = _traced("part", part, sorted(set(source_of.values())), num_processes, cache)
        cuts = {rank: cut(trace, len(self.chosen.microbatches)) for rank, trace in found.items()}
        return {rank: self._extrapolated(cuts[source], rank, rank // size) for rank, source in source_of.items()}

    def _program(self, program: Program, build: str, *first: str) -> Program:
        compiles = self.layout.compiles_anything and self.layout.compile_backend == "inductor"
        return program._replace(build=build, arguments=(*first, *self.arguments), compiles=compiles)

    def _extrapolated(self, source: CutTrace, rank: int, pp_rank: int) -> Trace:
        assert self.chosen is not None
        trace = instantiate(source, self.chosen, self.lowered[pp_rank])
        trace = relocated(trace, rank, self.schedule, self.blocks)
        return replace(trace, traced=trace.traced.replace(build=self.build.whole))


def _traced(
    part: Part, program: Program, ranks: Sequence[int], num_processes: int, cache: TraceCache | None
) -> dict[int, Trace]:
    """Return the traces of `ranks`, those from the cache that are in it, which then has all."""
    kept = {} if cache is None else cache.load(part, ranks)
    missing = [rank for rank in ranks if rank not in kept]
    if not missing:
        return kept
    made = trace_ranks(program, missing, num_processes)
    if cache is not None:
        cache.save(part, made)
    return kept | made


def job_steps(build: StepBuilder, resolved: ResolvedJob, num_ranks: int | None) -> JobSteps:
    """Return the step of a job on `num_ranks` ranks; raises ConfigError for a layout that is open or does not fit."""
    job = resolved.job
    layout = layout_of(job, num_ranks)
    schedule = build_schedule(layout, job.num_microbatches(layout), read_schedule(layout))
    return JobSteps(
        build=build,
        job=job,
        layout=layout,
        schedule=schedule,
        lowered=lower(schedule),
        chosen=choose_microbatches(schedule) if _keeps_parameters(layout) else None,
        alike=alike_pipeline_ranks(job, layout, schedule),
        blocks=blocks_of_job(job, layout),
        arguments=(job.model_dump_json(), str(resolved.folder)),
    )


def layout_of(job: Job, num_ranks: int | None) -> Layout:
    """Return the concrete layout of a job on `num_ranks` ranks, or cluster.num_devices, or what its degrees come to."""
    if job.layout.search:
        raise ConfigError(
            "layout.search = true leaves the layout open, and a trace is of one: "
            "write down what `meshwright plan` chooses, or set layout.search to false"
        )
    if job.layout.activation_checkpoint == "auto":
        raise ConfigError(
            'layout.activation_checkpoint = "auto" leaves open what blocks save, and a trace is of one choice: '
            "set layout.activation_checkpoint to none, selective or full"
        )
    found = num_ranks or job.cluster.num_devices
    if found is None and job.layout.rest_axis is not None:
        raise ConfigError(
            f"layout.{job.layout.rest_axis} = -1 takes the rest of the ranks, but their number is not given: "
            "set cluster.num_devices, or give the number of ranks"
        )
    return job.layout.resolve(found or job.layout.num_fixed_ranks)


def _keeps_parameters(layout: Layout) -> bool:
    """Return whether what an action finds gathered does not depend on which action ran before it.

    In a pipeline with parameters freed after forward it does, and there the orders of all microbatches differ.
    """
    return layout.pp == 1 or layout.reshard_after_forward in ("auto", "never")
