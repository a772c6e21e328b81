"""Decisions about copies that differ: who is wrong, and when that is not known."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.fault_tolerance.corruption.replica_vote import (
    Ballot,
    DifferingCopies,
    differing,
    differing_copies,
    wrong_ranks,
)


def ballots(digests: dict[int, int], copies: int = 7) -> list[Ballot]:
    return [Ballot(rank, copies, "gradients", digest) for rank, digest in digests.items()]


@given(st.dictionaries(st.integers(0, 63), st.integers(0, 3), min_size=1))
def test_copies_that_differ_are_found_whatever_the_order(digests: dict[int, int]) -> None:
    cast = [*ballots(digests), *ballots(dict.fromkeys(digests, 5), copies=8)]
    found = differing_copies(cast)
    assert found == differing_copies(cast[::-1])
    assert bool(found) == (len(set(digests.values())) > 1)
    assert all(one.copies == 7 and one.digests == digests for one in found)


@given(st.integers(3, 20), st.data())
def test_a_majority_names_who_is_outside_of_it(num_copies: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, num_copies - 1), max_size=(num_copies - 1) // 2, min_size=1))
    digests = {rank: 100 + rank if rank in wrong else 1 for rank in range(num_copies)}
    (found,) = differing_copies(ballots(digests))
    assert found.majority == 1
    assert set(found.suspects) == wrong
    assert found.source not in wrong


@given(st.integers(1, 8))
def test_halves_have_no_majority_and_all_are_suspects(half: int) -> None:
    digests = {rank: rank % 2 for rank in range(2 * half)}
    (found,) = differing_copies(ballots(digests))
    assert found.majority is None
    assert found.suspects == tuple(digests)


@given(st.integers(2, 10), st.data())
def test_recomputation_names_who_was_wrong_also_of_two(num_copies: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, num_copies - 1), min_size=1, max_size=num_copies - 1))
    found = DifferingCopies(7, "gradients", {rank: 100 + rank if rank in wrong else 1 for rank in range(num_copies)})
    after = ballots(dict.fromkeys(found.digests, 1))
    assert set(wrong_ranks(found, after)) == wrong


def test_a_step_that_is_not_reproducible_leaves_the_majority() -> None:
    found = DifferingCopies(7, "gradients", {0: 1, 1: 1, 2: 2})
    assert wrong_ranks(found, ballots({0: 9, 1: 9, 2: 9})) == (2,)
    assert wrong_ranks(found, ballots({0: 9, 1: 9, 2: 8})) == (2,)
    pair = DifferingCopies(7, "gradients", {0: 1, 1: 2})
    assert wrong_ranks(pair, ballots({0: 9, 1: 9})) == (0, 1)


def test_computations_are_compared_by_rank() -> None:
    first = ballots({0: 1, 1: 2, 2: 3})
    assert differing(first, ballots({0: 1, 1: 5, 2: 3})) == (1,)
    assert differing(first, first) == ()
