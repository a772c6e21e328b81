"""The minority of ranks is to blame, whatever it does differently."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hand_traces import ALL_GATHER, Script, all_of
from meshwright.simulator.checks.check_traces import check
from meshwright.spec.trace.trace_problem import TraceProblem

FOUR = (0, 1, 2, 3)
ALL_TO_ALL = "c10d.alltoall_base_.default"
BARRIER = "c10d.barrier.default"
BROADCAST = "c10d.broadcast_.default"
Step = Callable[[Script, bool], object]
"""Adds what a rank runs to its script, on some ranks with a mistake."""


def _missing_barrier(script: Script, is_wrong: bool) -> None:
    if not is_wrong:
        script.wait(script.collective(FOUR, op=BARRIER, num_bytes=1))
    script.wait(script.collective(FOUR))


def _extra_collective(script: Script, is_wrong: bool) -> None:
    script.wait(script.collective(FOUR))
    if is_wrong:
        script.wait(script.collective(FOUR, op=BARRIER))


def _other_reduction(script: Script, is_wrong: bool) -> None:
    script.wait(script.collective(FOUR, agreed="max" if is_wrong else "sum"))


def _other_root(script: Script, is_wrong: bool) -> None:
    script.wait(script.collective(FOUR, op=BROADCAST, agreed=f"root {int(is_wrong)} of the group"))


def _other_splits(script: Script, is_wrong: bool) -> None:
    receives = tuple(16 if is_wrong and peer != script.traced.rank else 8 for peer in FOUR)
    script.wait(script.collective(FOUR, op=ALL_TO_ALL, num_bytes=32, sends=(8,) * 4, receives=receives))


def _other_group(script: Script, is_wrong: bool) -> None:
    first = script.traced.rank // 2 * 2
    script.wait(script.collective(FOUR if is_wrong else (first, first + 1)))


@pytest.mark.parametrize("culprit", FOUR)
@pytest.mark.parametrize(
    "step", [_missing_barrier, _extra_collective, _other_reduction, _other_root, _other_splits, _other_group]
)
def test_the_one_rank_that_differs_is_to_blame_in_every_problem(step: Step, culprit: int) -> None:
    problems = _checked(step, culprit)
    assert problems
    assert {problem.culprit.rank for problem in problems} == {culprit}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_other_reduction, "in the same order, with the same reduction and root"),
        (_other_splits, "which expects 16 from it"),
        (_missing_barrier, "same collectives in the same order"),
    ],
)
def test_the_rule_says_what_differs(step: Step, message: str) -> None:
    (problem,) = _checked(step, 2)
    assert message in problem.rule


def test_all_to_all_of_uneven_splits_that_fit_each_other_is_sound() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        sizes = tuple(8 * (1 + (rank + peer) % 4) for peer in FOUR)
        script.wait(script.collective(FOUR, op=ALL_TO_ALL, num_bytes=80, sends=sizes, receives=sizes))
    assert check(all_of(*scripts)) == ()


def test_who_expects_another_size_of_one_rank_than_the_others_do_is_to_blame() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        receives = (8, 20 if rank == 2 else 16, 24, 32)
        sends = (8 * (rank + 1),) * 4
        script.wait(script.collective(FOUR, op="c10d.allgather_.default", sends=sends, receives=receives))
    (problem,) = check(all_of(*scripts))
    assert problem.culprit.rank == 2
    assert "rank 1 sends 16 bytes to rank 2, which expects 20" in problem.rule


def test_of_two_ranks_the_one_that_other_pairs_contradict_is_to_blame() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        script.wait(script.collective(pair, axis="tp", num_bytes=16 if rank == 2 else 8))
    (problem,) = check(all_of(*scripts))
    assert problem.culprit.rank == 2


@pytest.mark.parametrize("wrong", FOUR)
def test_of_two_ranks_with_different_roots_the_one_that_other_pairs_contradict_is_to_blame(wrong: int) -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        pair, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        script.wait(script.collective(pair, op=BROADCAST, agreed=f"root {int(rank == wrong)} of the group"))
        script.wait(script.collective(column))
    (problem,) = check(all_of(*scripts))
    assert (problem.culprit.rank, problem.is_tie) == (wrong, False)


def test_a_rank_that_takes_its_row_for_its_column_is_to_blame_in_both() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        for group in (row, column, row if rank else column):
            script.wait(script.collective(group))
    (problem,) = check(all_of(*scripts))
    assert (problem.culprit.rank, problem.num_more) == (0, 1)


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_ranks_that_nothing_else_distinguishes_either_may_be_wrong(wrong: int) -> None:
    scripts = [Script(rank, 2) for rank in (0, 1)]
    for rank, script in enumerate(scripts):
        script.wait(script.collective((0, 1), op=BROADCAST, agreed=f"root {int(rank == wrong)} of the group"))
    (problem,) = check(all_of(*scripts))
    assert problem.is_tie
    assert {problem.culprit.rank, *(other.rank for other in problem.others)} == {0, 1}
    assert "either: rank" in str(problem)
    assert "no majority" in str(problem)


def test_a_rank_of_fewer_messages_than_its_neighbours_is_one_problem() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        for _ in range(2 if rank == 1 else 4):
            if rank > 0:
                script.wait(script.receive(rank - 1, FOUR))
            if rank < 3:
                script.wait(script.send(rank + 1, FOUR))
    (problem,) = check(all_of(*scripts))
    assert (problem.culprit.rank, problem.num_more) == (1, 1)
    assert "rank 1 disagrees in other groups or messages, too (1)" in str(problem)


def test_of_a_message_the_end_that_other_messages_contradict_is_to_blame() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for sender, receiver, received in ((0, 1, 4), (1, 2, 8), (2, 3, 8)):
        scripts[sender].wait(scripts[sender].send(receiver, FOUR))
        scripts[receiver].wait(scripts[receiver].receive(sender, FOUR, num_bytes=received))
    (problem,) = check(all_of(*scripts))
    assert (problem.culprit.rank, problem.culprit.num_bytes) == (1, 4)


def test_who_sends_to_another_rank_than_the_others_is_to_blame() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        script.send(0 if rank == 2 else (rank + 1) % 4, FOUR)
        script.wait(script.receive((rank - 1) % 4, FOUR))
    problems = check(all_of(*scripts))
    assert {problem.culprit.rank for problem in problems} == {2}


def test_collectives_on_the_host_have_an_order_of_their_own() -> None:
    scripts = [Script(rank, 2) for rank in (0, 1)]
    for rank, script in enumerate(scripts):
        works = [script.collective((0, 1), axis=axis) for axis in ("", "(CPU tensors)")[:: 1 - 2 * rank]]
        for work in works:
            script.wait(work)
    assert check(all_of(*scripts)) == ()


def test_what_lacks_is_shown_with_what_came_before() -> None:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        script.wait(script.collective(FOUR, op=ALL_GATHER))
        if rank != 1:
            script.wait(script.collective(FOUR, op=BARRIER))
    (problem,) = check(all_of(*scripts))
    assert str(problem.culprit) == f"rank 1: nothing more after {ALL_GATHER} (forward)"


def _checked(step: Step, culprit: int) -> tuple[TraceProblem, ...]:
    scripts = [Script(rank, 4) for rank in FOUR]
    for rank, script in enumerate(scripts):
        step(script, rank == culprit)
    return check(all_of(*scripts))
