"""The trainer's own step, traced and then played: it ends as it is, and not with a record taken out of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.trace.trace import RecordKind, Records, Trace
from meshwright.spec.trace.trace_order import fingerprint
from meshwright.spec.trace.trace_problem import TraceProblem
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.trace_ranks import Program, trace_ranks
from trained_step import BUILD, arguments_of

RANKS = (0, 1)


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    program = Program(BUILD, 2, arguments_of("examples/tiny.toml", "layout.pp=2", "train.global_batch_size=8"))
    return trace_ranks(program, RANKS)


def test_the_step_as_it_is_ends_with_all_its_memory_told(traces: dict[int, Trace]) -> None:
    assert check(Traces.all_of(traces)) == ()
    step = simulate(Traces.all_of(traces), load_cluster("h100-ib400"))
    assert 0 < step.step_s < 1
    for rank, curve in zip(RANKS, step.memory, strict=True):
        assert curve.by_role.sum(axis=1).max() == traces[rank].live_bytes()[1:].max()
        assert (curve.by_role.sum(axis=1) <= curve.allocated_bytes).all()
        assert (curve.allocated_bytes <= curve.reserved_bytes).all()


@pytest.mark.long
def test_a_stage_without_experts_takes_part_in_their_statistics() -> None:
    keys = ("num_layers=2", "num_dense_layers=1")
    job = arguments_of("examples/tiny-moe.toml", "layout.pp=2", *(f"model.options.{key}" for key in keys))
    found = trace_ranks(Program(BUILD, 2, job), RANKS)
    assert check(Traces.all_of(found)) == ()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", [RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE])
def test_a_record_left_out_is_found(traces: dict[int, Trace], rank: int, kind: RecordKind) -> None:
    rows = np.flatnonzero(traces[rank].records.kind == kind)
    (problem, *_) = _without(traces, rank, int(rows[len(rows) // 2]))
    assert problem.culprit.rank == rank
    assert problem.kind == ("collective" if kind == RecordKind.COLLECTIVE else "message")
    assert problem.group in {(0, 1), (1, 0)}
    if problem.kind == "message":
        assert problem.culprit.action


def _without(traces: dict[int, Trace], rank: int, row: int) -> tuple[TraceProblem, ...]:
    """Return what is found where a rank leaves out one record."""
    records = Records(**{name: np.delete(column, row) for name, column in vars(traces[rank].records).items()})
    return check(Traces.all_of(traces | {rank: replace(traces[rank], records=records)}))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_shard=2 tp=2 pp=2", "dp_replicate=2 cp=2 pp=2"])
def test_classes_of_ranks_with_equal_traces_play_what_all_ranks_play(layout: str) -> None:
    arguments = arguments_of("examples/tiny.toml", *(f"layout.{degree}" for degree in layout.split()))
    full = trace_ranks(Program(BUILD, 8, arguments), range(8))
    first: dict[str, int] = {}
    class_of_rank = np.array([first.setdefault(fingerprint(trace), rank) for rank, trace in full.items()])
    assert len(first) < 8
    classes = Traces(8, {rank: full[rank] for rank in first.values()}, class_of_rank)
    cluster = load_cluster("h100-ib400")
    by_class, all_ranks = (simulate(traces, cluster) for traces in (classes, Traces.all_of(full)))
    assert by_class.step_s == pytest.approx(all_ranks.step_s, rel=1e-12)
    for rank in range(8):
        one, other = all_ranks.of_rank(rank), by_class.of_rank(int(class_of_rank[rank]))
        np.testing.assert_allclose(one.start_s, other.start_s, rtol=1e-12)
        np.testing.assert_allclose(one.end_s, other.end_s, rtol=1e-12)
