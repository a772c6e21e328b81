"""A simulation made by hand around a step made by hand; what reports are tested with."""

from __future__ import annotations

from meshwright.simulator.analysis.exposure import exposed_places
from meshwright.simulator.analysis.step_tables import rank_times
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Fix
from meshwright.spec.step.estimate import StepDecomposition
from meshwright.spec.step.simulation_report import (
    CollectiveUse,
    LiveTensors,
    Outcome,
    PaddedParameter,
    Padding,
    RankMemory,
    SavedTensors,
    SimulationReport,
)
from meshwright.spec.step.timeline_decomposition import compute_seconds, decompose
from meshwright.spec.step.workload import Workload
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.trace_problem import CallSite, TraceProblem
from meshwright.units import GiB

LAYOUT = Layout(pp=4, dp_shard=2)
PADDING = Padding(
    num_shards=8192,
    wire_factor=1.5,
    wasted_state_bytes=2**20,
    parameters=(PaddedParameter(name="blocks.attention.key", rows=1024, wire_factor=8.0, wasted_bytes=2**30),),
)
PROBLEM = TraceProblem(
    kind="deadlock",
    culprit=CallSite(rank=1, record=7, op="c10d.recv_.default", phase="forward"),
    rule="ranks wait in a circle: rank 1 for rank 2, rank 2 for rank 1",
)


def simulation_report_of(timeline: Timeline | None, usable_bytes: float = 64 * GiB) -> SimulationReport:
    """Return what a simulation says of `timeline`, and of none at all that it would not end."""
    return SimulationReport(
        job="examples/<job>.toml",
        model="llama3-8b",
        cluster="h100-ib400",
        device="h100-sxm",
        num_devices=8,
        layout=LAYOUT,
        workload=Workload(seq_len=2048, global_batch_size=64),
        usable_memory_bytes=round(usable_bytes),
        problems=() if timeline else (PROBLEM,),
        padding=PADDING,
        outcome=_outcome(timeline) if timeline else None,
    )


def _outcome(timeline: Timeline) -> Outcome:
    parts = decompose(timeline)
    gather = CollectiveUse(
        axis="fsdp",
        op="c10d._allgather_base_.default",
        num_ranks=2,
        count=16,
        num_bytes=1e9,
        total_s=0.096,
        exposed_s=0.03,
    )
    return Outcome(
        step_s=timeline.step_s,
        mfu=0.41,
        parts=parts,
        compute=compute_seconds(timeline),
        predicted_parts=StepDecomposition(compute_s=0.9 * parts.compute_s),
        memory=tuple(_memory(timeline, place) for place in range(len(timeline.ranks))),
        savings=(
            SavedTensors(
                num_bytes=2**34, num_tensors=32, op="aten.silu.default", scope="layers.*.ffn", recompute_s=0.25
            ),
        ),
        fixes=(Fix(change="layout.activation_checkpoint=selective", step_s=1.2),),
        ranks=rank_times(timeline, LAYOUT),
        collectives=(gather,),
        exposed=exposed_places(timeline),
        suggestions=("layout.prefetch = 2 would hide the gather of layers.*",),
    )


def _memory(timeline: Timeline, place: int) -> RankMemory:
    curve = timeline.memory[place]
    held = LiveTensors(
        num_bytes=2**34, num_tensors=32, role="activation", op="aten.mm.default", scope="layers.*.attention.query"
    )
    return RankMemory(
        rank=curve.rank,
        num_ranks=timeline.multiplicity[place],
        pipeline_rank=place,
        allocated_bytes=int(curve.allocated_bytes.max()),
        reserved_bytes=int(curve.reserved_bytes.max()),
        by_role={"activation": 20 * GiB, "parameter": 3 * GiB},
        at_s=timeline.step_s / 2,
        phase="backward",
        scope="layers.3.attention",
        op="aten.mm.default",
        largest=(held,),
    )
