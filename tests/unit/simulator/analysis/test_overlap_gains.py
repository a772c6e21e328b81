"""What could hide the communication that a step exposes."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.simulator.analysis.overlap_gains import Overlap, overlap_of, suggestions
from meshwright.spec.trace.timeline import SpanKind, Spans, Timeline, TimelineSource
from meshwright.spec.trace.trace import RecordKind, Trace
from written_steps import WrittenStep

COLLECTIVE = {"kind": int(RecordKind.COLLECTIVE), "group": 0}


def execution(trace: Trace, *spans: tuple[int, float, float]) -> Timeline:
    """Return a timeline of (record, start, end), where collectives are told from the trace."""
    record, start_s, end_s = (np.array(column) for column in zip(*spans, strict=True))
    communicates = trace.records.kind[record] == RecordKind.COLLECTIVE
    zero = np.zeros(len(spans), np.int64)
    columns = dict.fromkeys(("rank", "stream", "name", "scope", "phase", "action", "axis", "num_bytes"), zero)
    kind = np.where(communicates, SpanKind.COMMUNICATION, SpanKind.COMPUTE).astype(np.int64)
    return Timeline(
        source=TimelineSource(kind="simulated", name="by hand", world_size=2),
        step_s=float(end_s.max()),
        ranks=(0,),
        multiplicity=(2,),
        names=("",),
        scopes=trace.scopes,
        phases=trace.phases,
        actions=(),
        axes=("fsdp",),
        spans=Spans(**columns, start_s=start_s, end_s=end_s, kind=kind, record=record),
    )


def step_with_a_collective(scope: str = "block.3", op: str = "all_gather", *, is_sync: bool = False) -> Trace:
    """Return: a producer, work that needs neither, the collective, more such work, and who needs its result.

    A collective that is sync is waited for at once, by one more record.
    """
    step = WrittenStep()
    weight = step.there(8)
    made = step.make(8, reads=(weight,))
    step.make(8, reads=(weight,))
    step.scope = scope
    result = step.make(8)
    step.op(reads=(made,), writes=(result,), op=op, work=0, **COLLECTIVE)
    if is_sync:
        step.op(kind=int(RecordKind.WAIT), work=0)
    step.scope = ""
    step.make(8, reads=(weight,))
    step.op(reads=(result,))
    return step.trace()


def found(trace: Trace, *spans: tuple[int, float, float]) -> Overlap:
    return overlap_of(trace, execution(trace, *spans))


def test_what_could_begin_earlier_and_be_waited_for_later() -> None:
    # 6 s, behind 2 s of work that it need not wait for and before 1 s of work that need not wait for it.
    overlap = found(step_with_a_collective(), (0, 0, 1), (1, 1, 3), (3, 3, 9), (4, 9, 10), (5, 10, 11))
    (one,) = overlap.exposed
    assert (one.scope, one.op, one.axis, one.count) == ("block.*", "all_gather", "fsdp", 1)
    assert (one.exposed_s, one.earlier_s, one.later_s, one.gain_s) == (6, 2, 1, 3)
    assert (overlap.communication_s, overlap.exposed_s) == (6, 6)


def test_what_computes_meanwhile_is_not_exposed() -> None:
    overlap = found(step_with_a_collective(), (0, 0, 1), (1, 1, 5), (3, 3, 6), (4, 5, 5.5), (5, 6, 7))
    (one,) = overlap.exposed
    # From 3 to 6, of which work takes 3 to 5.5.
    assert one.exposed_s == pytest.approx(0.5)
    assert overlap.communication_s == 3


def test_what_is_hidden_whole_is_not_told() -> None:
    assert found(step_with_a_collective(), (0, 0, 1), (1, 1, 5), (3, 2, 4)).exposed == ()


def test_no_gain_is_more_than_what_is_exposed() -> None:
    (one,) = found(step_with_a_collective(), (0, 0, 1), (1, 1, 9), (3, 9, 10), (4, 10, 20), (5, 20, 21)).exposed
    assert (one.exposed_s, one.earlier_s, one.later_s, one.gain_s) == (1, 1, 1, 1)


def test_a_gather_of_fsdp_is_ready_when_the_parameters_are() -> None:
    step = WrittenStep()
    shard = step.there(8)
    step.make(8)
    step.scope = "FSDP::all_gather (blocks.1)"
    step.phase = "backward"
    buffer = step.make(16, reads=(shard,), op="fsdp.all_gather_copy_in.default")
    step.op(reads=(buffer,), writes=(buffer,), op="all_gather", **COLLECTIVE)
    trace = step.trace()
    (one,) = found(trace, (0, 0, 5), (1, 5, 5.5), (2, 5.5, 7.5)).exposed
    assert (one.exposed_s, one.earlier_s) == (2, 2)
    assert one.keys == ("layout.prefetch", "layout.reshard_after_forward")


def test_a_job_is_advised_by_its_keys_and_a_program_by_calls() -> None:
    step = step_with_a_collective("FSDP::all_gather (blocks.1)")
    overlap = found(step, (0, 0, 1), (1, 1, 3), (3, 3, 9), (4, 9, 10), (5, 10, 11))
    (job,) = suggestions(overlap, 11.0, is_job=True)
    assert job == (
        "rank 0: up to 3 s of all_gather (fsdp, forward, FSDP::all_gather (blocks.*)) could hide behind computation: "
        "layout.prefetch"
    )
    (program,) = suggestions(overlap, 11.0, is_job=False)
    assert program.endswith("could hide behind computation: set_modules_to_forward_prefetch()")
    assert suggestions(overlap, 11_000.0, is_job=False) == ()


def advice_to_a_program(trace: Trace) -> str:
    """Return the suggestion for the step's collective, where two computations come after it."""
    first, second = len(trace.records) - 2, len(trace.records) - 1
    overlap = found(trace, (0, 0, 1), (1, 1, 3), (3, 3, 9), (first, 9, 10), (second, 10, 11))
    assert suggestions(overlap, 11.0, is_job=True) == ()
    (program,) = suggestions(overlap, 11.0, is_job=False)
    return program.partition("could hide behind computation: ")[2]


ORDER = "start it as soon as its input is written and call wait() where its result is first used"


def test_a_programs_own_collective_could_start_earlier_or_be_waited_for_later() -> None:
    trace = step_with_a_collective(op="c10d.allreduce_.default", is_sync=True)
    assert advice_to_a_program(trace) == f"with async_op=True, {ORDER}"


def test_what_is_async_already_is_not_advised_to_become_so() -> None:
    assert advice_to_a_program(step_with_a_collective(op="c10d.allreduce_.default")) == ORDER


def test_the_reductions_of_ddp_are_advised_by_what_its_user_can_change() -> None:
    trace = step_with_a_collective("DDP::all_reduce", "c10d.allreduce_.default")
    assert advice_to_a_program(trace) == "more tokens in each backward, or a smaller bucket_cap_mb"


def test_a_step_that_communicates_nothing_exposes_nothing() -> None:
    step = WrittenStep()
    step.make(8)
    assert found(step.trace(), (0, 0, 1)) == Overlap(rank=0, communication_s=0, exposed_s=0)
