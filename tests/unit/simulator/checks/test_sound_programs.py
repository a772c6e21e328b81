"""Random programs of collectives and messages on random groups are sound; one mutation of one rank is found there."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_traces import ALL_GATHER, ALL_REDUCE, Script, all_of
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.checks.hazards import hazards
from meshwright.simulator.engine.rank_classes import group_equivalent
from meshwright.spec.trace.traces import Traces

NUM_RANKS = 6
OPS = (ALL_REDUCE, ALL_GATHER, "c10d.broadcast_.default", "c10d.barrier.default")
MUTATIONS = ("left out", "twice", "other op", "other size", "other reduction")


class Collective(NamedTuple):
    """One collective of a program, in the order in which all ranks run it."""

    ranks: tuple[int, ...]
    op: str
    num_bytes: int


# Groups of three or more: of two ranks that differ nothing tells which is wrong.
_groups = st.lists(st.integers(0, NUM_RANKS - 1), min_size=3, max_size=NUM_RANKS, unique=True)
_collectives = st.builds(
    Collective, _groups.map(lambda ranks: tuple(sorted(ranks))), st.sampled_from(OPS), st.sampled_from((8, 16, 64))
)
programs = st.lists(_collectives, min_size=1, max_size=12)


def traces_of(program: list[Collective], wrong: int = -1, rank: int = -1, mutation: str = "") -> Traces:
    """Return the traces of a program, in which one rank runs the collective `wrong` with a mutation."""
    scripts = [Script(number, NUM_RANKS) for number in range(NUM_RANKS)]
    for number, one in enumerate(program):
        for member in one.ranks:
            is_wrong = (number, member) == (wrong, rank)
            for _ in range(_times(mutation) if is_wrong else 1):
                _run(scripts[member], one, mutation if is_wrong else "")
    return all_of(*scripts)


def _times(mutation: str) -> int:
    return {"left out": 0, "twice": 2}.get(mutation, 1)


def _run(script: Script, one: Collective, mutation: str) -> None:
    script.op(1.0)
    op = "c10d._reduce_scatter_base_.default" if mutation == "other op" else one.op
    num_bytes = one.num_bytes + 4 * (mutation == "other size")
    agreed = "max" if mutation == "other reduction" else "sum"
    script.wait(script.collective(one.ranks, op=op, num_bytes=num_bytes, agreed=agreed))


@pytest.mark.slow
@given(programs)
def test_a_sound_program_has_no_problem_and_no_warning(program: list[Collective]) -> None:
    traces = traces_of(program)
    assert check(traces) == ()
    assert hazards(traces) == ()
    assert check(group_equivalent(traces)) == ()


@pytest.mark.slow
@given(programs, st.data())
def test_one_mutation_of_one_rank_is_found_and_blamed(program: list[Collective], data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, len(program) - 1))
    rank = data.draw(st.sampled_from(program[wrong].ranks))
    problems = check(traces_of(program, wrong, rank, data.draw(st.sampled_from(MUTATIONS))))
    assert problems
    assert problems[0].culprit.rank == rank
