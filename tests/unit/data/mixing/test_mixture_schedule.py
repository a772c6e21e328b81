"""A mixture's schedule keeps its shares at every position, and is a function of the position alone."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.mixing.mixture_order import MixtureOrder
from meshwright.data.mixing.mixture_schedule import MixtureSchedule
from meshwright.data.order import Share
from meshwright.spec.job.mixture_source import MAX_TOTAL_WEIGHT, whole_weights

WEIGHTS = st.lists(st.integers(0, 2**20), min_size=1, max_size=12).filter(any)
HUGE = st.lists(st.integers(0, (MAX_TOTAL_WEIGHT - 1) // 4), min_size=1, max_size=4).filter(any)


@given(weights=WEIGHTS | HUGE, first=st.integers(0, 10**12), number=st.integers(1, 200))
def test_counts_stay_within_the_bound_of_the_shares(weights: list[int], first: int, number: int) -> None:
    schedule, total = MixtureSchedule(weights), sum(weights)
    assert all(error < 1.7 for error in schedule.max_error)
    assert len(weights) > 3 or all(error <= 1 for error in schedule.max_error)
    for positions in (number, first, first + number):
        counts = schedule.counts(positions)
        assert sum(counts) == positions
        for count, weight, error in zip(counts, weights, schedule.max_error, strict=True):
            assert abs(count - Fraction(positions * weight, total)) <= Fraction(error) + Fraction(1, 10**9)


@given(weights=WEIGHTS | HUGE, first=st.integers(0, 10**12), number=st.integers(1, 200))
def test_positions_are_numbered_as_they_are_counted(weights: list[int], first: int, number: int) -> None:
    schedule = MixtureSchedule(weights)
    sources, numbers = schedule.at(np.arange(first, first + number).reshape(1, -1))
    counts = schedule.counts(first)
    for source, own in zip(sources[0].tolist(), numbers[0].tolist(), strict=True):
        assert own == counts[source], "the next one of its source"
        counts[source] += 1
    assert counts == schedule.counts(first + number)


def test_a_period_is_the_whole_weights() -> None:
    assert MixtureSchedule([7, 2, 1]).counts(10) == [7, 2, 1]
    assert MixtureSchedule([7, 0, 1]).counts(80) == [70, 0, 10]
    assert MixtureSchedule([5]).counts(3) == [3]
    assert MixtureSchedule([1, 1]).max_error == [0.5, 0.5]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.2, 0.1], (7, 2, 1)), ([1.0, 3.0], (1, 3)), ([1e-3, 0.0, 2.0], (1, 0, 2000)), ([0.1, 0.3], (1, 3))],
)
def test_weights_are_the_decimals_that_are_written(weights: list[float], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@st.composite
def orders(draw: st.DrawFn, sizes: list[int] | None = None) -> MixtureOrder:
    sizes = sizes or draw(SIZES)
    weights = st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)).filter(any)
    firsts = sorted(draw(st.sets(st.integers(1, 300), max_size=3)))
    stages = [(first, MixtureSchedule(draw(weights))) for first in (0, *firsts)]
    names = [str(number) for number in range(len(sizes))]
    return MixtureOrder(names, sizes, stages, seed=draw(st.integers(0, 9)), shuffle=draw(st.booleans()))


@given(sizes=SIZES, data=st.data())
def test_each_epoch_of_a_source_has_each_of_its_samples_once(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(orders(sizes))
    samples = order.samples_at(np.arange(600)).tolist()
    offset = 0
    for use, size in zip(order.use(600), sizes, strict=True):
        own = [sample for sample in samples if offset <= sample < offset + size]
        assert (use.num_samples, use.epochs) == (len(own), len(own) / size)
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            assert len(set(epoch)) == len(epoch), "none twice"
        offset += size
    assert all(0 <= sample < offset for sample in samples)


@given(
    order=orders(), step=st.integers(0, 60), split=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1), (4, 3), (12, 1)])
)
def test_any_ranks_and_microbatches_read_the_same_samples(
    order: MixtureOrder, step: int, split: tuple[int, int]
) -> None:
    dp_degree, microbatch_size = split
    shares = [Share(12, microbatch_size, rank, dp_degree) for rank in range(dp_degree)]
    by_slot = {}
    for share in shares:
        samples = order.samples_at(share.positions(step))
        by_slot |= dict(zip(share.slots.ravel().tolist(), samples.ravel().tolist(), strict=True))
    whole = order.samples_at(np.arange(step * 12, step * 12 + 12)).tolist()
    assert [by_slot[slot] for slot in range(12)] == whole


def test_sources_of_one_size_are_shuffled_differently() -> None:
    order = MixtureOrder(["a", "b"], [50, 50], [(0, MixtureSchedule([1, 1]))], seed=0, shuffle=True)
    samples = order.samples_at(np.arange(100))
    first, second = samples[samples < 50], samples[samples >= 50] - 50
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == sorted(second.tolist())
