"""Ranks that differ: a clock for every rank of a class gives what simulating each rank by its own trace gives."""

from __future__ import annotations

import numpy as np
import pytest

from hand_traces import ALL_GATHER, Script, all_of
from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.analysis.step_tables import stragglers_of
from meshwright.simulator.engine.conditions import Conditions
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.fault import Fault
from meshwright.spec.machine.device import Figure
from meshwright.spec.trace.timeline import SpanKind, Timeline
from meshwright.spec.trace.traces import Traces

LAUNCH = Figure.from_dict(
    {"value": 1e-9, "source": {"kind": "measured", "title": "a host that is never late", "date": "2026"}}
)
CLUSTER = load_cluster("h100-ib400")
CLUSTER = CLUSTER.replace(device=CLUSTER.device.replace(host_launch_s=LAUNCH))
NUM_BLOCKS, NUM_MICROBATCHES = 6, 4


def _mesh(tp: int, dp: int, pp: int) -> np.ndarray:
    return np.arange(tp * dp * pp).reshape(pp, dp, tp)


def _script(rank: int, mesh: np.ndarray) -> Script:
    """A pipeline of two stages whose blocks gather parameters along dp and activations along tp."""
    (place,) = np.argwhere(mesh == rank)
    pp, dp, tp = place
    script = Script(rank, mesh.size)
    tp_group, dp_group, pp_group = (tuple(row.tolist()) for row in (mesh[pp, dp], mesh[pp, :, tp], mesh[:, dp, tp]))
    for _ in range(NUM_MICROBATCHES):
        if pp > 0:
            script.wait(script.receive(pp_group[pp - 1], pp_group, num_bytes=1 << 20))
        for _ in range(NUM_BLOCKS):
            gathered = script.collective(dp_group, op=ALL_GATHER, axis="fsdp", num_bytes=1 << 22)
            for _ in range(8):
                script.op()
            script.wait(gathered)
            script.wait(script.collective(tp_group, axis="tp", num_bytes=1 << 18))
            for _ in range(4):
                script.op()
        if pp < mesh.shape[0] - 1:
            script.send(pp_group[pp + 1], pp_group, num_bytes=1 << 20)
    script.sync()
    script.wait(script.collective(tuple(range(mesh.size)), num_bytes=8))
    script.op()
    return script


def _step(traces: Traces, conditions: Conditions) -> Timeline:
    return simulate(traces, CLUSTER.with_num_devices(max(traces.world_size, 8)), "hand", conditions)


def _both(tp: int, dp: int, pp: int) -> tuple[Traces, Traces]:
    """Return one trace for each pipeline rank, and one for every rank."""
    mesh = _mesh(tp, dp, pp)
    size = tp * dp
    by_class = {rank: _script(rank, mesh).trace() for rank in range(0, mesh.size, size)}
    every = all_of(*(_script(rank, mesh) for rank in range(mesh.size)))
    return Traces(mesh.size, by_class, np.arange(mesh.size) // size * size), every


@pytest.mark.parametrize("degrees", [(2, 4, 1), (2, 4, 2), (8, 2, 2), (1, 8, 1)])
@pytest.mark.parametrize("jitter", [0.05, 0.3])
def test_one_trace_a_class_takes_as_long_as_every_rank_simulated(degrees: tuple[int, int, int], jitter: float) -> None:
    by_class, every = _both(*degrees)
    conditions = Conditions(seed=3, jitter=jitter)
    ours, theirs = _step(by_class, conditions), _step(every, conditions)
    # The two differ in which transfers share links, for which noise does not count.
    assert ours.step_s == pytest.approx(theirs.step_s, rel=2e-3)
    assert ours.step_s > (1 + 0.1 * jitter) * _step(by_class, Conditions()).step_s


@pytest.mark.slow
def test_the_wait_grows_with_the_ranks_as_the_expected_maximum_does() -> None:
    # One collective after 12 operations of equal length, whose sum spreads by jitter / sqrt(12).
    for num_ranks, normal_maximum in ((8, 1.4236), (64, 2.3437), (512, 3.0365)):
        traces = _one_collective(num_ranks)
        usual = _step(traces, Conditions())
        began_s = [_began_s(_step(traces, Conditions(seed, 0.1))) for seed in range(40)]
        expected_s = 0.1 / np.sqrt(12) * normal_maximum * _computed_s(usual, 0)
        assert np.mean(began_s) - _began_s(usual) == pytest.approx(expected_s, rel=0.15)


def _began_s(step: Timeline) -> float:
    """Return when the step's only collective begins."""
    return float(step.spans.start_s[step.spans.kind == SpanKind.COMMUNICATION].max())


def _one_collective(num_ranks: int) -> Traces:
    script = Script(0, num_ranks)
    for _ in range(12):
        script.op()
    script.wait(script.collective(tuple(range(num_ranks)), num_bytes=8))
    return Traces(num_ranks, {0: script.trace()}, np.zeros(num_ranks, np.int64))


def test_what_a_rank_draws_does_not_depend_on_its_class() -> None:
    by_class, _ = _both(2, 4, 1)
    noisy = Conditions(seed=1, jitter=0.2)
    whole, split = (_step(traces, noisy) for traces in (by_class, split_classes(by_class, [5])))
    assert whole.step_s == pytest.approx(split.step_s, rel=1e-3)
    assert split.ranks == (0, 1, 4, 5)


def test_one_slow_rank_is_one_rank_and_the_others_wait_for_it() -> None:
    by_class, every = _both(2, 4, 2)
    slow = Conditions(faults=(Fault(kind="slow-rank", rank=11, argument=3.0),))
    ours, theirs = _step(by_class, slow), _step(every, slow)
    assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-9)
    assert dict(zip(ours.ranks, ours.multiplicity, strict=True))[11] == 1
    for rank in ours.ranks:
        assert _computed_s(ours, rank) == pytest.approx(_computed_s(theirs, rank), rel=1e-9)
    assert _computed_s(ours, 11) > 2.5 * _computed_s(ours, 10)


def test_the_table_of_stragglers_has_the_slow_rank_and_who_waits_where() -> None:
    traces = split_classes(_both(1, 8, 1)[0], [3])
    slow = Conditions(faults=(Fault(kind="slow-rank", rank=3, argument=2.0),))
    slowed, usual = _step(traces, slow), _step(traces, Conditions())
    found = stragglers_of(slowed, usual, traces)
    others, own = found.ranks
    assert (own.rank, own.num_ranks, others.num_ranks) == (3, 1, 7)
    assert own.added_compute_s == pytest.approx(own.compute_s / 2, rel=0.1)
    assert own.added_wait_s < 0
    assert others.added_compute_s < 0.02 * others.compute_s
    assert (others.axis, others.op) == ("fsdp", ALL_GATHER)
    # The step is longer by what the others wait for.
    assert others.added_wait_s == pytest.approx(slowed.step_s - usual.step_s, rel=0.15)
    assert others.op_wait_s == pytest.approx(others.added_wait_s, rel=0.15)


def _computed_s(step: Timeline, rank: int) -> float:
    spans = step.of_rank(rank)
    is_compute = spans.kind == SpanKind.COMPUTE
    return float((spans.end_s - spans.start_s)[is_compute].sum())


def test_a_slow_rank_splits_its_class_by_the_groups_that_it_is_in() -> None:
    by_class, every = _both(2, 4, 2)
    split = split_classes(by_class, [3])
    # Rank 3 itself, 2 in its tp group, 1, 5 and 7 in its fsdp group, the rest; so for the next pipeline rank.
    assert split.class_of_rank[:8].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert split.class_of_rank[8:].tolist() == [8, 9, 10, 11, 8, 9, 8, 9]
    for rank, trace in split.traces.items():
        assert trace.groups == every.traces[rank].groups
        assert trace.records.peer.tolist() == every.traces[rank].records.peer.tolist()
