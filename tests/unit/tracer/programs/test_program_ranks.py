"""Which ranks of a program are traced, and for whom they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hand_traces import Script
from meshwright.errors import UnsupportedError
from meshwright.simulator.checks.check_traces import check, with_earlier
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.spec.trace.trace import GroupCall, Trace
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs import program_ranks
from meshwright.tracer.programs.program_ranks import Axis, axis_of, trace_program
from meshwright.tracer.programs.trace_ranks import Program

COUNT = 512
WORLD = tuple(range(COUNT))
TP, DP = 8, 64


def traced(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[Script], object], count: int = COUNT, *, every_rank: bool = False
) -> tuple[Traces, set[int]]:
    """Return the traces of a program in which each rank's script is filled by `step`, and the ranks that were asked."""
    asked: set[int] = set()

    def trace_ranks(program: Program, ranks: Sequence[int]) -> dict[int, Trace]:
        asked.update(ranks)
        scripts = {rank: Script(rank, program.world_size) for rank in ranks}
        for script in scripts.values():
            step(script)
        return {rank: script.trace() for rank, script in scripts.items()}

    monkeypatch.setattr(program_ranks, "trace_ranks", trace_ranks)
    return trace_program(Program("mine:step", count), every_rank=every_rank), asked


def mesh(script: Script) -> None:
    """Reduce over tensor-parallel neighbours, then over data-parallel replicas."""
    rank = script.traced.rank
    script.wait(script.collective(tuple(range(rank // TP * TP, rank // TP * TP + TP)), axis="tp"))
    script.wait(script.collective(tuple(range(rank % TP, COUNT, TP)), axis="dp"))


def pipeline(script: Script) -> None:
    """Pass activations along four stages of 128 ranks."""
    rank, size = script.traced.rank, COUNT // 4
    stages = tuple(range(rank % size, COUNT, size))
    if rank >= size:
        script.wait(script.receive(rank - size, stages))
    script.op(1.0)
    if rank < COUNT - size:
        script.wait(script.send(rank + size, stages))


def test_ranks_of_a_mesh_are_one_role_of_which_the_edges_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, asked = traced(monkeypatch, mesh)
    assert asked == {*range(TP), 8, COUNT // 2, COUNT - TP, COUNT - 1}
    assert traces.traced == tuple(sorted(asked))
    assert traces.class_of_rank.tolist() == [0] * COUNT
    assert check(traces) == ()


def test_each_stage_of_a_pipeline_is_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, _ = traced(monkeypatch, pipeline)
    assert sorted(traces.traces) == [0, 128, 256, 384]
    assert (traces.class_of_rank == np.arange(COUNT) // 128 * 128).all()
    assert check(traces) == ()


@pytest.mark.parametrize("odd", [1, COUNT - 1])
def test_a_rank_that_differs_has_a_role_of_its_own_and_is_to_blame(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    def step(script: Script) -> None:
        mesh(script)
        if script.traced.rank != odd:
            script.wait(script.collective(WORLD))

    traces, _ = traced(monkeypatch, step)
    assert (traces.class_of_rank == odd).sum() == 1
    assert {problem.culprit.rank for problem in check(traces)} == {odd}


def test_a_mistake_on_a_middle_place_of_two_short_axes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        pipeline(script)
        rank = script.traced.rank
        if (rank // 128, rank % TP) != (3, 3):
            script.wait(script.collective(tuple(range(rank // TP * TP, rank // TP * TP + TP)), axis="tp"))

    traces, _ = traced(monkeypatch, step)
    culprits = {problem.culprit.rank for problem in check(traces)}
    assert culprits
    assert {(rank // 128, rank % TP) for rank in culprits} == {(3, 3)}


@pytest.mark.parametrize("size", [4, 16])
def test_messages_among_all_ranks_are_a_pipeline_of_as_many_stages_as_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    stride = COUNT // size

    def step(script: Script) -> None:
        rank = script.traced.rank
        if rank >= stride:
            script.wait(script.receive(rank - stride, WORLD))
        if rank < COUNT - stride:
            script.wait(script.send(rank + stride, WORLD))

    traces, asked = traced(monkeypatch, step)
    assert len(traces.traces) == size
    assert len(asked) < 64
    assert check(traces) == ()
    # A slow rank's peers are kept apart from those of others.
    assert check(split_classes(traces, [3])) == ()


def test_a_pipeline_within_each_replica_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        rank, stage = script.traced.rank, script.traced.rank // TP % 4
        if stage:
            script.wait(script.receive(rank - TP, WORLD))
        if stage < 3:
            script.wait(script.send(rank + TP, WORLD))

    traces, _ = traced(monkeypatch, step)
    assert sorted(traces.traces) == [0, 8, 16, 24]
    assert check(traces) == ()


def ring(script: Script, count: int, wrong: int | None = None) -> None:
    """Pass something round, where even ranks send first; one rank may skip its neighbour."""
    rank = script.traced.rank
    peer = (rank + (2 if rank == wrong else 1)) % count
    everyone, turns = tuple(range(count)), [(script.send, peer), (script.receive, (rank - 1) % count)]
    for call, other in turns if rank % 2 == 0 else turns[::-1]:
        script.wait(call(other, everyone))


@pytest.mark.parametrize("count", [128, 1024])
def test_a_ring_of_all_ranks_has_a_role_for_those_who_send_first_and_one_for_the_others(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    traces, asked = traced(monkeypatch, lambda script: ring(script, count), count)
    assert (traces.class_of_rank == np.arange(count) % 2).all()
    assert len(asked) < 64
    assert check(traces) == ()


def test_in_a_ring_with_a_wrong_neighbour_every_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, asked = traced(monkeypatch, lambda script: ring(script, 128, wrong=4), 128)
    assert len(asked) == 128
    assert 4 in {problem.culprit.rank for problem in check(traces)}
    with pytest.raises(UnsupportedError, match="too many"):
        traced(monkeypatch, lambda script: ring(script, 1024, wrong=4), 1024)


def test_in_rings_within_nodes_and_of_their_first_ranks_every_other_node_does_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ring_step(script: Script, ranks: tuple[int, ...]) -> None:
        place = ranks.index(script.traced.rank)
        sent = script.send(ranks[(place + 1) % len(ranks)], ranks)
        script.wait(script.receive(ranks[place - 1], ranks))
        script.wait(sent)

    def step(script: Script) -> None:
        first = script.traced.rank // 8 * 8
        ring_step(script, tuple(range(first, first + 8)))
        if script.traced.rank == first:
            ring_step(script, tuple(range(0, COUNT, 8)))

    traces, asked = traced(monkeypatch, step)
    assert sorted(traces.traces) == list(range(16))
    assert len(asked) < 64
    assert check(traces) == ()


def test_of_a_pipeline_within_each_long_group_every_place_is_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    size, count = 40, 240

    def step(script: Script) -> None:
        rank, stage = script.traced.rank, script.traced.rank % size
        stages = tuple(range(rank - stage, rank - stage + size))
        if stage:
            script.wait(script.receive(rank - 1, stages))
        if stage < size - 1:
            script.wait(script.send(rank + 1, stages))

    traces, _ = traced(monkeypatch, step, count)
    assert sorted(traces.traces) == list(range(size))
    assert check(traces) == ()


@pytest.mark.parametrize("is_earlier", [False, True])
def test_messages_that_follow_no_axis_are_no_deadlock(monkeypatch: pytest.MonkeyPatch, is_earlier: bool) -> None:
    side = 9

    def transpose(script: Script) -> None:
        """Exchange with the rank at the mirrored place of a square."""
        rank = script.traced.rank
        peer = rank % side * side + rank // side
        if peer != rank:
            works = script.send(peer, tuple(range(side**2))), script.receive(peer, tuple(range(side**2)))
            for work in works:
                script.wait(work)

    def trace_ranks(program: Program, ranks: Sequence[int]) -> dict[int, Trace]:
        found = {}
        for rank in ranks:
            script, other = Script(rank, side**2), Script(rank, side**2)
            transpose(script)
            other.op(1.0)
            step, before = (other, script) if is_earlier else (script, other)
            found[rank] = replace(step.trace(), earlier=before.trace())
        return found

    monkeypatch.setattr(program_ranks, "trace_ranks", trace_ranks)
    traces = trace_program(Program("mine:step", side**2))
    assert with_earlier(traces, check(traces)) == ()


@pytest.mark.parametrize("odd", [1, 255])
def test_a_rank_that_uses_a_wrong_group_of_the_same_size_is_found(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    def step(script: Script) -> None:
        rank = script.traced.rank
        row, column = tuple(range(rank // 16 * 16, rank // 16 * 16 + 16)), tuple(range(rank % 16, 256, 16))
        script.wait(script.collective(column if rank == odd else row))

    traces, _ = traced(monkeypatch, step, 256)
    assert {problem.culprit.rank for problem in check(traces)} == {odd}


def test_of_a_chain_of_all_ranks_every_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        rank = script.traced.rank
        if rank:
            script.wait(script.receive(rank - 1, tuple(range(100))))
        if rank < 99:
            script.wait(script.send(rank + 1, tuple(range(100))))

    traces, asked = traced(monkeypatch, step, 100)
    assert len(asked) == 100
    assert check(traces) == ()


def test_a_message_to_a_wrong_replica_is_found_and_its_sender_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    size = COUNT // 4

    def step(script: Script) -> None:
        rank = script.traced.rank
        if rank >= size:
            script.wait(script.receive(rank - size, WORLD))
        if rank < COUNT - size:
            # The last replica of the second stage.
            script.wait(script.send(rank + size - (rank == 2 * size - 1), WORLD))

    traces, _ = traced(monkeypatch, step)
    assert {problem.culprit.rank for problem in check(traces)} == {2 * size - 1}


def test_what_only_the_builder_of_one_rank_does_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace_ranks(program: Program, ranks: Sequence[int]) -> dict[int, Trace]:
        found = {}
        for rank in ranks:
            script, before = Script(rank, COUNT), Script(rank, COUNT)
            mesh(script)
            if rank % TP != 5:
                before.wait(before.collective(WORLD))
            found[rank] = replace(script.trace(), earlier=before.trace())
        return found

    monkeypatch.setattr(program_ranks, "trace_ranks", trace_ranks)
    traces = trace_program(Program("mine:step", COUNT))
    assert check(traces) == ()
    found = with_earlier(traces, ())
    assert "in the builder or the first call" in found[0].rule
    assert {problem.culprit.rank % TP for problem in found} == {5}


def test_groups_that_one_place_of_an_axis_makes_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [GroupCall(tuple(range(first, first + TP)), "mine.py:7") for first in range(0, COUNT, TP)]

    def trace_ranks(program: Program, ranks: Sequence[int]) -> dict[int, Trace]:
        found = {}
        for rank in ranks:
            script = Script(rank, COUNT)
            mesh(script)
            calls = groups[::-1] if rank % TP == 5 else groups
            found[rank] = replace(script.trace(), group_calls=tuple(calls))
        return found

    monkeypatch.setattr(program_ranks, "trace_ranks", trace_ranks)
    (problem,) = check(trace_program(Program("mine:step", COUNT)))
    assert problem.culprit.rank % TP == 5
    assert "new_group()" in problem.rule


def test_a_rank_that_differs_and_harms_nothing_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        if script.traced.rank == COUNT - 1:
            script.op(1.0)
        mesh(script)

    traces, _ = traced(monkeypatch, step)
    assert check(traces) == ()


def test_up_to_64_ranks_all_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        for _ in range(2 if script.traced.rank == 37 else 1):
            script.wait(script.collective(tuple(range(64))))

    traces, asked = traced(monkeypatch, step, 64)
    assert len(asked) == 64
    assert [problem.culprit.rank for problem in check(traces)] == [37]


def test_every_rank_is_traced_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(traced(monkeypatch, mesh, every_rank=True)[1]) == COUNT


@pytest.mark.slow
def test_too_many_roles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(script: Script) -> None:
        for _ in range(script.traced.rank):
            script.op(1.0)
        mesh(script)

    with pytest.raises(UnsupportedError, match="trace them all with --every-rank"):
        traced(monkeypatch, step)


def test_an_axis_is_a_group_whose_ranks_are_a_stride_apart() -> None:
    assert axis_of((3, 11, 19)) == Axis(8, 3)
    assert axis_of((0, 1, 3)) is None
    assert axis_of((4, 5, 6)) is None
