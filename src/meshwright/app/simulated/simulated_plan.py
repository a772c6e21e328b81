"""simulated_plan(): a plan whose best layouts were traced and simulated, and are ranked by that."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from meshwright.app.progress import elapsed
from meshwright.app.simulated.simulate_layouts import Steps, simulate_layouts
from meshwright.config.load import ResolvedJob
from meshwright.cost.stacks import OURS
from meshwright.errors import ConfigError, InfeasibleLayout
from meshwright.log import progress
from meshwright.pages.tables.simulated_table import why_dropped
from meshwright.planner.plan import make_plan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.simplicity import complexity_of
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.layout_plan import Candidate, Plan, SimulatedStep
from meshwright.tracer.programs.fork_server import server_socket
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
    precision = resolved.job.precision.compute
    if request.workload.precision != precision:
        raise ConfigError(
            f"--simulate runs the job's own step, whose precision.compute is {precision}, and the plan is for "
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
