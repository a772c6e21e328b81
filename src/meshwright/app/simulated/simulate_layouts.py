"""simulate_layouts(): layouts of one job, each traced and simulated as `meshwright simulate` would, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from socket import socket

from meshwright.config.load import ResolvedJob
from meshwright.errors import MeshwrightError
from meshwright.simulator.checks.check_traces import mismatches
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.run.layout_plan import SimulatedStep
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.fork_server import server_socket, share
from meshwright.tracer.programs.trace_ranks import device_type_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.launch.hidden_script import hidden_script
from meshwright.trainer.step.step_builder import TRAINER_STEP


@dataclass(frozen=True)
class Steps:
    """What is simulated: a job's step on every device of a cluster."""

    resolved: ResolvedJob
    cluster: Cluster


def simulate_layouts(
    steps: Steps, layouts: Sequence[Layout], report: Callable[[int, SimulatedStep], None]
) -> list[SimulatedStep]:
    """Return the step of each layout; `report` gets each one's position and step as soon as it is known."""
    num_cores = os.cpu_count() or 1
    # One layout more than cores, and of each as many ranks as cores: else one core idles while the last layout ends.
    num_workers = min(num_cores + 1, len(layouts))
    # A fork of a process that may have threads can deadlock; spawned ones have none, and never import torch.
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (server_socket(),)) as pool:
        with hidden_script():  # submit() starts the workers
            futures = {pool.submit(simulate_layout, steps, layout, num_cores): n for n, layout in enumerate(layouts)}
        found: dict[int, SimulatedStep] = {}
        for future in as_completed(futures):
            position = futures[future]
            found[position] = future.result()
            report(position, found[position])
    return [found[position] for position in range(len(layouts))]


def _begin(tracers: socket) -> None:
    """Share the parent's tracers, and leave the terminal to it, which shows the progress of all layouts."""
    share(tracers)
    os.environ["TERM"] = "dumb"


def simulate_layout(steps: Steps, layout: Layout, num_processes: int = 1) -> SimulatedStep:
    """Return the step of the job under `layout`, `num_processes` of its ranks traced at a time.

    One that cannot be traced, priced or ended has a problem in place of a time: others are still ranked.
    """
    try:
        traces = _traces(steps, layout, num_processes)
        problems = mismatches(traces)
        if problems:
            return SimulatedStep(problem="; ".join(str(problem) for problem in problems))
        timeline = simulate(traces, steps.cluster)
    except MeshwrightError as error:
        return SimulatedStep(problem=str(error))
    return SimulatedStep(step_s=timeline.step_s, reserved_bytes=_reserved(timeline, traces, layout))


def _traces(steps: Steps, layout: Layout, num_processes: int) -> Traces:
    """Return the traces of the job under `layout`."""
    job = steps.resolved.job.replace(layout=LayoutRequest(**layout.model_dump()))
    resolved, device = replace(steps.resolved, job=job), device_type_of(steps.cluster.device)
    return trace_job(
        TRAINER_STEP, resolved, layout.num_ranks, device=device, how=TraceOptions(num_processes=num_processes)
    )


def _reserved(timeline: Timeline, traces: Traces, layout: Layout) -> tuple[int, ...]:
    """Return the most that any rank of each pipeline rank reserves."""
    peaks = {curve.rank: int(curve.reserved_bytes.max()) for curve in timeline.memory}
    size = traces.world_size // layout.pp
    return tuple(
        max(peaks[rank] for rank in set(traces.class_of_rank[first : first + size].tolist()))
        for first in range(0, traces.world_size, size)
    )
