"""From the traces of a job's ranks to all that a simulation reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.memory.footprint_states import padding_of
from meshwright.errors import ConfigError
from meshwright.planner.candidate import judge
from meshwright.planner.explain.verdict import memory_fixes
from meshwright.planner.request import PlanRequest
from meshwright.simulator.analysis.exposure import collective_uses, exposed_places
from meshwright.simulator.analysis.overlap_gains import overlap_of, suggestions
from meshwright.simulator.analysis.step_tables import rank_memory, rank_times, stragglers_of
from meshwright.simulator.checks.check_traces import check, mismatches, with_earlier
from meshwright.simulator.checks.hazards import hazards_in_background, message_hazards
from meshwright.simulator.engine.conditions import Conditions
from meshwright.simulator.engine.rank_classes import group_equivalent
from meshwright.simulator.memory.live_at_peak import savings_of
from meshwright.simulator.simulate_step import Deadlock, device_model, simulate
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.step.simulation_report import Outcome, Padding, RankMemory, SimulationReport, Stragglers
from meshwright.spec.step.timeline_decomposition import compute_seconds, decompose
from meshwright.spec.step.workload import Workload
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class Subject:
    """What is simulated."""

    name: str
    """The job file, or the program."""
    model: str
    cluster: Cluster
    layout: Layout | None
    """None for a program that is no job, as are the next two."""
    workload: Workload | None
    request: PlanRequest | None
    """What the planner would be asked; None, too, for a model that its formulas do not know."""
    overrides: tuple[str, ...] = ()
    """section.key=value, which distinguish its timeline from others of the job."""


def simulate_traces(
    subject: Subject, traces: Traces, conditions: Conditions
) -> tuple[SimulationReport, Timeline | None]:
    """Return the result of the traces on the target's cluster, and the timeline; None for a deadlock.

    Where `conditions` has a fault of a rank, `traces` makes that rank a class of its own (engine/rank_classes.py).
    """
    problems = mismatches(traces, conditions)
    classes = traces if problems or conditions.faults else group_equivalent(traces)
    try:
        timeline = (
            None
            if problems
            else simulate(classes, subject.cluster, " ".join((subject.name, *subject.overrides)), conditions)
        )
    except Deadlock:
        # Of all ranks, so that the ones to blame are named.
        timeline, problems = None, check(traces, conditions)
    problems = with_earlier(traces, problems)
    timeline = None if problems else timeline
    if timeline is not None and timeline.step_s == 0:
        raise ConfigError(f"{subject.name}: nothing that its step runs takes time: return a step that computes")
    # Tables are made by one process, so that other processors are free.
    with hazards_in_background(traces) as found:
        outcome = None if timeline is None else _outcome(subject, classes, timeline, conditions)
        of_ranks = found()
    device = subject.cluster.device
    report = SimulationReport(
        job=subject.name,
        model=subject.model,
        cluster=subject.cluster.name,
        device=device.name,
        num_devices=traces.world_size,
        layout=subject.layout,
        workload=subject.workload,
        usable_memory_bytes=round(device.usable_memory_bytes),
        problems=problems,
        hazards=of_ranks if problems else (*of_ranks, *message_hazards(traces)),
        num_traced=len(traces.traced or traces.traces),
        traced_ranks=traces.traced if len(traces.traced) < traces.world_size else (),
        guesses=tuple(map(str, traces.guesses())),
        padding=_padding(subject),
        outcome=outcome,
    )
    return report, timeline


def _padding(subject: Subject) -> Padding | None:
    if subject.layout is None or subject.request is None:
        return None
    setup = subject.request.setup
    return padding_of(setup.model, subject.layout, setup.workload.activation_element_bytes)


def _outcome(subject: Subject, traces: Traces, timeline: Timeline, conditions: Conditions) -> Outcome:
    memory = rank_memory(timeline, traces, subject.layout)
    ranks = rank_times(timeline, subject.layout, traces)
    # An idle rank has no operation that could hold less, and a program of the host alone no rank with memory.
    busy = [rank for rank in memory if len(traces.of_rank(rank.rank).records)]
    most = max(busy, key=lambda rank: rank.reserved_bytes).rank if busy else timeline.ranks[0]
    fullest, model = traces.of_rank(most), device_model(subject.cluster)
    signature_s = op_seconds(fullest.signatures, subject.cluster.device)
    most_exposed = max(ranks, key=lambda one: one.parts.exposed_s).rank
    overlap = overlap_of(traces.of_rank(most_exposed), timeline)
    parts = decompose(timeline)
    return Outcome(
        step_s=timeline.step_s,
        parts=parts,
        compute=compute_seconds(timeline),
        fixed_cpu_bound_s=min(model.fixed_host_s(fullest), parts.cpu_bound_s),
        memory=memory,
        savings=savings_of(fullest, signature_s, can_offload=model.can_offload),
        ranks=ranks,
        stragglers=_stragglers(subject, traces, timeline, conditions),
        collectives=collective_uses(timeline, traces),
        exposed=exposed_places(timeline),
        suggestions=suggestions(overlap, timeline.step_s, is_job=subject.layout is not None),
        **_formulas(subject, timeline, memory),
    )


def _stragglers(subject: Subject, traces: Traces, timeline: Timeline, conditions: Conditions) -> Stragglers | None:
    if not conditions.has_stragglers:
        return None
    return stragglers_of(timeline, simulate(traces, subject.cluster, subject.name, conditions.nominal), traces)


def _formulas(subject: Subject, timeline: Timeline, memory: Sequence[RankMemory]) -> dict[str, Any]:
    """Return what the planner's formulas add to an outcome: nothing for a model that they do not know."""
    layout, request = subject.layout, subject.request
    if layout is None or request is None:
        return {}
    predicted = judge(layout, request).estimate
    missing = max((rank.reserved_bytes for rank in memory), default=0) - request.cluster.device.usable_memory_bytes
    return {
        "predicted": predicted,
        "predicted_parts": predicted.step.summed(),
        # The floor is the model's FLOPs at the peak, where one is stated.
        "mfu": None if predicted.mfu is None else predicted.step.model_flops_at_peak_s / timeline.step_s,
        "fixes": memory_fixes(layout, request, missing) if missing > 0 else (),
    }
