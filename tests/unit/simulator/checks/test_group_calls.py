"""All ranks call new_group() alike: a rank that leaves a call out, or passes other ranks, is named with the line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.simulator.checks.check_traces import check
from meshwright.spec.trace.trace import GroupCall, Trace
from meshwright.spec.trace.traces import Traces
from written_steps import WrittenStep

PAIR, OTHER, ALL = GroupCall((0, 1), "train.py:7"), GroupCall((2, 3), "train.py:8"), GroupCall((), "train.py:9")


def trace_of(rank: int, calls: tuple[GroupCall, ...]) -> Trace:
    trace = WrittenStep().trace()
    return replace(trace, traced=trace.traced.replace(rank=rank, world_size=4), group_calls=calls)


def traces_of(*calls: tuple[GroupCall, ...]) -> Traces:
    return Traces.all_of({rank: trace_of(rank, own) for rank, own in enumerate(calls)})


@pytest.mark.parametrize("calls", [(), (PAIR,), (PAIR, OTHER, ALL)])
def test_ranks_that_make_the_same_groups_are_right(calls: tuple[GroupCall, ...]) -> None:
    assert check(traces_of(calls, calls, calls, calls)) == ()


@pytest.mark.parametrize(
    ("calls", "culprit", "line"),
    [
        # Members alone: those who leave the call out are to blame, however many they are.
        (((PAIR,), (PAIR,), (), ()), "rank 2: nothing more", "train.py:7"),
        (((PAIR,), (), (), ()), "rank 1: nothing more", "train.py:7"),
        (((PAIR,), (PAIR,), (OTHER,), (PAIR,)), "rank 2 (train.py:8): new_group(ranks 2 and 3)", "train.py:7"),
        (
            ((PAIR, ALL), (PAIR, ALL), (PAIR, ALL), (PAIR,)),
            "rank 3: nothing more after new_group(ranks 0",
            "train.py:9",
        ),
    ],
)
def test_a_rank_that_makes_other_groups_is_named(
    calls: tuple[tuple[GroupCall, ...], ...], culprit: str, line: str
) -> None:
    (problem,) = check(traces_of(*calls))
    assert f"culprit: {culprit}" in str(problem)
    assert f"({line}): new_group(" in str(problem)
    assert "use_local_synchronization" in problem.rule


def test_where_each_rank_makes_its_own_group_only_both_calls_are_named() -> None:
    (problem,) = check(traces_of((PAIR,), (PAIR,), (OTHER,), (OTHER,)))
    assert problem.is_tie
    assert "either: rank 3 (train.py:8): new_group(ranks 2 and 3)" in str(problem)
    assert "or: rank 0 (train.py:7): new_group(ranks 0 and 1)" in str(problem)


def test_calls_travel_with_their_trace(tmp_path: Path) -> None:
    trace = trace_of(1, (PAIR, ALL))
    trace.save(tmp_path / "trace.npz")
    assert Trace.load(tmp_path / "trace.npz").group_calls == (PAIR, ALL)
