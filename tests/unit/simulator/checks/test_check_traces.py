"""Planted mistakes: each is found, and the rank and record that are to blame are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hand_traces import ALL_GATHER, Script, all_of
from meshwright.errors import ConfigError
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.engine.conditions import Conditions
from meshwright.spec.fault import Fault
from meshwright.spec.trace.trace import Records, Trace
from meshwright.spec.trace.traces import Traces

THREE = (0, 1, 2)


def _good(rank: int) -> Script:
    script = Script(rank, 3)
    for _ in range(2):
        script.wait(script.collective(THREE, op=ALL_GATHER, axis="fsdp", num_bytes=64))
        script.op(1.0)
        script.wait(script.collective(THREE, axis="fsdp", num_bytes=32))
    if rank > 0:
        script.wait(script.receive(rank - 1, THREE))
    if rank < 2:
        script.wait(script.send(rank + 1, THREE))
    return script


def _traces() -> dict[int, Trace]:
    return {rank: _good(rank).trace() for rank in THREE}


def _with_records(trace: Trace, rows: list[int]) -> Trace:
    columns = {name: column[rows] for name, column in vars(trace.records).items()}
    return replace(trace, records=Records(**columns))


def test_a_good_step_has_no_problem() -> None:
    assert check(Traces.all_of(_traces())) == ()


@pytest.mark.parametrize("culprit", THREE)
def test_a_collective_that_one_rank_leaves_out_is_found_there(culprit: int) -> None:
    traces = _traces()
    rows = [row for row in range(len(traces[culprit].records)) if row not in (3, 4)]
    traces[culprit] = _with_records(traces[culprit], rows)
    (problem,) = check(Traces.all_of(traces))
    assert (problem.kind, problem.culprit.rank, problem.culprit.record) == ("collective", culprit, 3)
    assert problem.group == THREE
    assert problem.others[0].op == "c10d.allreduce_.default"
    assert f"rank {culprit}, record 3 (forward): c10d._allgather_base_.default of 64 bytes float32" in str(problem)


def test_collectives_in_another_order_are_found() -> None:
    traces = _traces()
    traces[1] = _with_records(traces[1], [3, 4, 2, 0, 1, *range(5, len(traces[1].records))])
    (problem,) = check(Traces.all_of(traces))
    assert (problem.culprit.rank, problem.culprit.record) == (1, 0)


def test_another_size_is_found() -> None:
    traces = _traces()
    num_bytes = traces[2].records.num_bytes.copy()
    num_bytes[5] = 128
    traces[2] = replace(traces[2], records=replace(traces[2].records, num_bytes=num_bytes))
    (problem,) = check(Traces.all_of(traces))
    assert (problem.culprit.rank, problem.culprit.record, problem.culprit.num_bytes) == (2, 5, 128)


def test_a_message_without_its_receive_is_found() -> None:
    traces = _traces()
    traces[2] = _with_records(traces[2], [*range(len(traces[2].records) - 2)])
    (problem,) = check(Traces.all_of(traces))
    assert (problem.kind, problem.culprit.rank, problem.group) == ("message", 2, (1, 2))
    assert "has no receive" in problem.rule


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    first, second, third = (Script(rank, 3) for rank in THREE)
    first.wait(first.collective((0, 1)))
    first.wait(first.collective((0, 2), axis="b"))
    second.wait(second.collective((1, 2), axis="c"))
    second.wait(second.collective((0, 1)))
    third.wait(third.collective((0, 2), axis="b"))
    third.wait(third.collective((1, 2), axis="c"))
    (problem,) = check(all_of(first, second, third))
    assert problem.kind == "deadlock"
    assert "rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0" in problem.rule
    assert (problem.culprit.rank, problem.culprit.record, problem.is_tie) == (0, 1, True)
    assert "look at all" in str(problem)


def test_a_circle_in_which_one_waits_elsewhere_names_it() -> None:
    scripts = [Script(rank, 3) for rank in THREE]
    for script, axes in zip(scripts, ("ab", "ab", "ba"), strict=True):
        for axis in axes:
            script.wait(script.collective(THREE, axis=axis))
    (problem,) = check(all_of(*scripts))
    assert (problem.kind, problem.culprit.rank, problem.is_tie) == ("deadlock", 2, False)


def test_a_circle_through_the_host_is_found() -> None:
    first, second = Script(0, 2), Script(1, 2)
    first.wait(first.collective((0, 1)))
    first.sync()
    first.send(1, (0, 1))
    second.wait(second.receive(0, (0, 1)))
    second.sync()
    second.collective((0, 1))
    (problem,) = check(all_of(first, second))
    assert (problem.kind, problem.culprit.rank) == ("deadlock", 0)


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_a_rank_that_stops_is_named_with_who_waits(kind: str) -> None:
    fault = Fault.from_dict({"kind": kind, "rank": 1, "phase": "forward", "argument": 4.0})
    (problem,) = check(Traces.all_of(_traces()), Conditions(faults=(fault,)))
    assert (problem.kind, problem.culprit.rank, problem.culprit.record) == ("stopped", 1, 4)
    assert [place.rank for place in problem.others] == [0, 2]


def test_a_dropped_message_is_named() -> None:
    fault = Fault(kind="drop-message", rank=1)
    (problem,) = check(Traces.all_of(_traces()), Conditions(faults=(fault,)))
    assert (problem.kind, problem.culprit.rank, problem.culprit.op) == ("message", 1, "c10d.send.default")


def test_a_fault_that_affects_nothing_is_refused() -> None:
    traces = Traces.all_of(_traces())
    for fault, field in (
        (Fault(kind="crash", rank=9), "use a rank from 0 to 2"),
        (Fault(kind="crash", rank=0, phase="optimizer"), "use one of forward"),
        (Fault(kind="drop-message", rank=2), "has 0 messages sent"),
    ):
        with pytest.raises(ConfigError, match=field):
            check(traces, Conditions(faults=(fault,)))
