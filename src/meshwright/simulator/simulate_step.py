"""simulate(): the traced step of every rank, executed on a cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshwright.errors import ConfigError
from meshwright.simulator.background import in_background
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.device_model import device_model
from meshwright.simulator.engine.build_timeline import intervals_of, timeline_of
from meshwright.simulator.engine.conditions import USUAL, Conditions
from meshwright.simulator.engine.execute import execute
from meshwright.simulator.engine.matching import match
from meshwright.simulator.engine.noisy_execution import noisy_execution
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.simulator.memory.memory_curve import memory_of
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.trace.timeline import Timeline, TimelineSource
from meshwright.spec.trace.traces import Traces


class Deadlock(ConfigError):
    """The step deadlocks; the message says why."""


def simulate(traces: Traces, cluster: Cluster, name: str = "", conditions: Conditions = USUAL) -> Timeline:
    """Return one step of `traces` on `cluster`, with its memory; `name` is the job's.

    Ranks with a fault in `conditions` are in the timeline, as are those of their groups.

    Raises Deadlock with the problems of check() where the step never ends, and UnsupportedError where the catalogue
    lacks a rate that the step needs.
    """
    traces = split_classes(traces, [fault.rank for fault in conditions.faults])
    comm_ops = match(traces)
    ranks, num_records = list(traces.traces), sum(len(trace.records) for trace in traces.traces.values())
    model = device_model(cluster)
    totals_of_rank = partial(model.memory_totals, conditions=conditions)
    with in_background(totals_of_rank, [traces.traces[rank] for rank in ranks], num_records) as found:
        execution = execute(traces, comm_ops, model.costs(traces, comm_ops, conditions), conditions)
        if not execution.is_done:
            problems = "\n".join(str(problem) for problem in check(traces, conditions))
            raise Deadlock(f"the step of {name or 'these traces'} deadlocks:\n{problems}")
        if conditions.is_noisy:
            execution = noisy_execution(traces, comm_ops, execution, conditions)
        when = {
            host.rank: intervals_of(traces.traces[host.rank], comm_ops, execution, host) for host in execution.hosts
        }
        timeline = timeline_of(traces, comm_ops, execution, when, _source(traces, cluster, name))
        totals = dict(zip(ranks, found(), strict=True))
    memory = tuple(memory_of(traces.traces[rank], when[rank].start_s, totals[rank]) for rank in when)
    return replace(timeline, memory=memory)


def _source(traces: Traces, cluster: Cluster, name: str) -> TimelineSource:
    traced = next(iter(traces.traces.values())).traced
    return TimelineSource(
        kind="simulated",
        name=name or traced.build,
        world_size=traces.world_size,
        cluster=f"{cluster.name}:{cluster.num_devices}",
        versions={"torch": traced.torch_version},
    )
