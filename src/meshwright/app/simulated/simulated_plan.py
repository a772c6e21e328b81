"""simulated_plan(): a plan whose best layouts were traced and simulated, in parallel, and are ranked by that."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from socket import socket

from meshwright.app.job.settle_float8 import settle_float8
from meshwright.app.progress import elapsed
from meshwright.config.load import ResolvedJob
from meshwright.cost.stack_factors import OURS
from meshwright.errors import ConfigError, InfeasibleLayout, MeshwrightError
from meshwright.log import progress
from meshwright.pages.tables.simulated_table import why_dropped
from meshwright.planner.plan import make_plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import complexity_of
from meshwright.simulator.checks.check_traces import mismatches
from meshwright.simulator.engine.conditions import Conditions
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.run.layout_plan import Candidate, Plan, SimulatedStep
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.fork_server import server_socket, share
from meshwright.tracer.programs.trace_ranks import device_type_of
from meshwright.tracer.trace_job import TraceOptions, trace_job
from meshwright.trainer.launch.local.rank_fork_server import hidden_script
from meshwright.trainer.step.step_builder import TRAINER_STEP
from meshwright.units import counted, format_bytes, format_duration

_ALIKE = 0.03
"""Relative difference below which simulated steps count as equal; smaller than that of formulas, since every operator
is simulated."""


@dataclass(frozen=True)
class Finalists:
    """Which layouts of a job are simulated, and how many others the plan shows."""

    resolved: ResolvedJob
    num_simulated: int
    num_runners_up: int
    min_scored: int | None = None
    """Layouts that the search scores at least; None for its default."""


def simulated_plan(request: PlanRequest, finalists: Finalists) -> Plan:
    """Return the plan around the simplest of the layouts that are the fastest when simulated and then fit.

    The formulas choose what is simulated: their pick and the best layouts of other splits. Which is picked, the
    simulated steps say alone. Raises InfeasibleLayout where none of them fits.
    """
    _require_runnable(request, finalists.resolved)
    # It imports torch while the search runs.
    server_socket()
    num_runners_up = max(finalists.num_runners_up, finalists.num_simulated - 1)
    plan = make_plan(request, num_runners_up, finalists.min_scored)
    candidates = _simulated([plan.pick, *plan.runners_up][: finalists.num_simulated], request, finalists)
    dropped = tuple(one for one in candidates if why_dropped(one, plan.usable_memory_bytes) is not None)
    kept = sorted((one for one in candidates if one not in dropped), key=_simulated_s)
    if not kept:
        raise _none_fits(dropped, plan)
    pick = _simplest(kept)
    if pick.layout != plan.pick.layout:
        plan = make_plan(request, num_runners_up, finalists.min_scored, chosen=pick.layout)
    seen = {layout_text(one.layout) for one in candidates}
    others = [one for one in plan.runners_up if layout_text(one.layout) not in seen]
    runners_up = (*(one for one in kept if one is not pick), *others)[: finalists.num_runners_up]
    return plan.replace(pick=pick, runners_up=runners_up, dropped=dropped)


def by_simulation(resolved: ResolvedJob, request: PlanRequest) -> Candidate:
    """Return the layout to train with, of as many finalists as the job's planner.simulate says."""
    # On a host, which emulates float8, what is priced is traced.
    resolved, _ = settle_float8(resolved, request.cluster)
    finalists = Finalists(resolved, resolved.job.planner.simulate, num_runners_up=0, min_scored=0)
    return simulated_plan(request, finalists).pick


def _simulated(candidates: list[Candidate], request: PlanRequest, finalists: Finalists) -> list[Candidate]:
    """Return the candidates with their simulated steps; says on stderr what is known of each as soon as it is."""
    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(finalists.resolved.folder))
    progress.info("tracing and simulating %s", counted(len(candidates), "layout"))

    num_done = 0

    def report(position: int, step: SimulatedStep) -> None:
        nonlocal num_done
        num_done += 1
        show(_simulated_words(num_done, len(candidates)))
        candidate = candidates[position]
        planned = format_duration(candidate.estimate.step.total_s)
        found = step.problem or "no step" if step.step_s is None else _words(step)
        name = layout_text(candidate.layout)
        progress.info("[%d/%d] %s: %s; planned %s", position + 1, len(candidates), name, found, planned)

    layouts = [candidate.layout for candidate in candidates]
    with elapsed(_simulated_words(0, len(candidates))) as show:
        steps = simulate_layouts(Steps(finalists.resolved, request.cluster), layouts, report)
    return [candidate.replace(simulated=step) for candidate, step in zip(candidates, steps, strict=True)]


def _simulated_words(num_done: int, num_layouts: int) -> str:
    return f"simulated {num_done} of {counted(num_layouts, 'layout')}"


def _words(step: SimulatedStep) -> str:
    return f"{format_duration(step.step_s or 0.0)} simulated, {format_bytes(step.fullest_bytes or 0)} reserved"


def _simplest(kept: list[Candidate]) -> Candidate:
    """Return the simplest of those whose simulated step is the shortest, to within what simulations rank."""
    limit_s = _simulated_s(kept[0]) * (1 + _ALIKE)
    fast = [one for one in kept if _simulated_s(one) <= limit_s]
    return min(fast, key=lambda one: (complexity_of(one), _simulated_s(one)))


def _simulated_s(candidate: Candidate) -> float:
    assert candidate.simulated is not None
    assert candidate.simulated.step_s is not None
    return candidate.simulated.step_s


def _require_runnable(request: PlanRequest, resolved: ResolvedJob) -> None:
    """Raise ConfigError for a request about what Meshwright's own trainer does not run."""
    if request.setup.stack.name != OURS:
        raise ConfigError(
            f"--simulate runs Meshwright's own step, and the plan is for {request.setup.stack.name}: leave out "
            "--stack, or set --simulate 0"
        )
    precision = resolved.job.precision.matmuls
    if request.workload.precision != precision:
        raise ConfigError(
            f"--simulate runs the job's own step, whose precision is {precision}, and the plan is for "
            f"{request.workload.precision}: leave out --precision, or set --simulate 0"
        )


def _none_fits(dropped: tuple[Candidate, ...], plan: Plan) -> InfeasibleLayout:
    reasons = "".join(f"\n  {layout_text(one.layout)}: {why_dropped(one, plan.usable_memory_bytes)}" for one in dropped)
    is_memory = any(one.simulated is not None and one.simulated.fullest_bytes is not None for one in dropped)
    which = "the best layout does not run" if len(dropped) == 1 else f"none of the {len(dropped)} best layouts runs"
    return InfeasibleLayout(
        f"{which} when simulated:{reasons}\n{'raise planner.memory_margin, or ' * is_memory}"
        f"simulate more of them: --simulate {2 * len(dropped)}, or none: --simulate 0"
    )


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
        timeline = simulate(traces, steps.cluster, conditions=Conditions().under(layout))
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
