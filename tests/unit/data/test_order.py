import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.order import SampleOrder, Share


def epoch_of(order: SampleOrder, epoch: int) -> list[int]:
    return order.samples_at(np.arange(order.num_samples) + epoch * order.num_samples).tolist()


@given(num_samples=st.integers(1, 5000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_each_epoch_visits_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(SampleOrder(num_samples, seed), epoch)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [*range(1, 70), 127, 128, 129, 4095, 4096, 4097])
def test_bijection_around_powers_of_two(num_samples: int) -> None:
    assert sorted(epoch_of(SampleOrder(num_samples, seed=1), 0)) == list(range(num_samples))


def test_a_corpus_of_trillions_needs_no_table() -> None:
    order = SampleOrder(3 * 10**12 + 7, seed=5)
    samples = order.samples_at(np.arange(10_000))
    assert len(set(samples.tolist())) == 10_000
    assert samples.min() >= 0
    assert samples.max() < order.num_samples
    # Uniform on [0, n): the mean of 10,000 draws lies within 4 standard errors of n / 2.
    assert abs(samples.mean() / order.num_samples - 0.5) < 4 / np.sqrt(12 * 10_000)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [epoch_of(SampleOrder(1000, seed), epoch) for seed in range(4) for epoch in range(4)]
    for first in range(len(orders)):
        for second in range(first):
            # Two random permutations agree in 1 place on average.
            assert sum(a == b for a, b in zip(orders[first], orders[second], strict=True)) < 10


def test_neighbours_are_torn_apart() -> None:
    samples = np.array(epoch_of(SampleOrder(4096, seed=3), 0))
    correlation = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(4096)


def test_small_domains_reach_every_place_evenly() -> None:
    counts = np.zeros((5, 5), dtype=int)
    for seed in range(2000):
        counts[np.arange(5), epoch_of(SampleOrder(5, seed), 0)] += 1
    # Binomial(2000, 1/5): 400 with a standard deviation of 18.
    assert np.abs(counts - 400).max() < 5 * 18


def test_order_is_the_same_on_every_machine_and_release() -> None:
    # Checkpoints of older releases resume on this order: a change here needs a new position format.
    assert epoch_of(SampleOrder(10, seed=0), 0) == [1, 7, 9, 6, 3, 4, 5, 8, 0, 2]


def test_without_shuffle_the_order_is_the_samples_own() -> None:
    order = SampleOrder(7, seed=9, shuffle=False)
    assert order.samples_at(np.arange(16)).tolist() == [*range(7), *range(7), 0, 1]


@pytest.mark.slow
@given(num_samples=st.integers(1, 50), start=st.integers(0, 500), count=st.integers(0, 200))
def test_any_window_of_positions_equals_the_whole(num_samples: int, start: int, count: int) -> None:
    order = SampleOrder(num_samples, seed=2)
    whole = order.samples_at(np.arange(start + count))
    assert order.samples_at(np.arange(start, start + count)).tolist() == whole[start:].tolist()


shares = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 5))


@given(sizes=shares, step=st.integers(0, 10**6))
def test_ranks_and_microbatches_part_the_global_batch(sizes: tuple[int, int, int], step: int) -> None:
    dp_degree, microbatch_size, num_microbatches = sizes
    global_batch_size = dp_degree * microbatch_size * num_microbatches
    ranks = [Share(global_batch_size, microbatch_size, rank, dp_degree) for rank in range(dp_degree)]
    assert all(share.slots.shape == (num_microbatches, microbatch_size) for share in ranks)
    rows = sorted(row for share in ranks for row in share.positions(step).tolist())
    flat = [position for row in rows for position in row]
    assert flat == list(range(step * global_batch_size, (step + 1) * global_batch_size))


def test_a_microbatch_starts_where_the_contract_says() -> None:
    share = Share(24, microbatch_size=3, dp_rank=1, dp_degree=4)
    assert share.slots.tolist() == [[3, 4, 5], [15, 16, 17]]
