"""A rank that is 1.5 times slower is found, and none of ranks that are equally fast, on a busy machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.fault_tolerance.stragglers.phase_times import TIMED_PHASES
from meshwright.fault_tolerance.stragglers.straggler_score import LEAST_STEPS, stragglers
from meshwright.fault_tolerance.stragglers.straggler_watch import peers_of
from meshwright.spec.layout.layout import Layout

USUAL_S = np.array([0.002, 0.1, 0.2, 0.01, 0.03])
BACKWARD = TIMED_PHASES.index("backward")


def times(seed: int, num_ranks: int, noise: float, num_steps: int = 16, long_steps: float = 0.1) -> np.ndarray:
    """Return own times [ranks, steps, phases] with noise whose neighbouring steps are alike, and some long steps."""
    draw = np.random.default_rng(seed)
    logs = np.zeros((num_ranks, num_steps, len(USUAL_S)))
    state = draw.standard_normal((num_ranks, len(USUAL_S)))
    for step in range(num_steps):
        fresh = draw.standard_normal(state.shape)
        state = 0.5 * state + np.sqrt(0.75) * fresh
        logs[:, step] = noise * state
    long = draw.random((num_ranks, num_steps, 1)) < long_steps
    return USUAL_S * np.exp(logs) * np.where(long, draw.uniform(2, 10), 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4, 8]), st.floats(0.01, 0.04))
def test_a_rank_one_and_a_half_times_slower_is_found_in_sixteen_steps(seed: int, num_ranks: int, noise: float) -> None:
    own_s = times(seed, num_ranks, noise, long_steps=0.0)
    rank = seed % num_ranks
    own_s[rank, :, BACKWARD] *= 1.5
    found = stragglers(own_s, [range(num_ranks)])
    assert [one.rank for one in found] == [rank]
    assert found[0].phase == BACKWARD
    assert found[0].times_slower == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 500), marks=pytest.mark.long)], ids=str)
def test_no_rank_is_accused_of_noise(seeds: range) -> None:
    """Over 500 windows of equally fast ranks: 2 to 8 ranks, noise of up to 40 %, a tenth of steps far longer."""
    accused = 0
    for seed in seeds:
        num_ranks, noise = (2, 3, 4, 8)[seed % 4], (0.05, 0.1, 0.2, 0.4)[seed // 4 % 4]
        accused += bool(stragglers(times(seed, num_ranks, noise), [range(num_ranks)]))
    assert accused == 0


def test_half_a_window_decides_nothing() -> None:
    own_s = times(0, 4, 0.02)
    own_s[1, :, BACKWARD] *= 3
    assert stragglers(own_s[:, : LEAST_STEPS - 1], [range(4)]) == []
    assert len(stragglers(own_s, [range(4)])) == 1


def test_a_phase_of_no_weight_accuses_none() -> None:
    own_s = times(0, 4, 0.02)
    own_s[1, :, 0] *= 3
    assert stragglers(own_s, [range(4)]) == []


def test_stages_are_not_compared_with_each_other() -> None:
    own_s = times(0, 4, 0.02)
    own_s[2:] *= 2
    assert stragglers(own_s, peers_of(Layout(pp=2, dp_shard=2))) == []
    assert peers_of(Layout(pp=2, dp_shard=2)) == [[0, 1], [2, 3]]
    own_s[3, :, BACKWARD] *= 2
    assert [one.rank for one in stragglers(own_s, peers_of(Layout(pp=2, dp_shard=2)))] == [3]


def test_a_rank_without_peers_has_no_score() -> None:
    assert stragglers(times(0, 2, 0.02) * np.array([1, 5])[:, None, None], [[0], [1]]) == []
