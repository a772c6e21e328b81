"""What is drawn of a timeline: an interval for each action, runs of equal spans on each stream."""

from __future__ import annotations

import pytest

from meshwright.pages.figures.intervals import action_intervals, stream_intervals
from meshwright.spec.trace.timeline import SpanKind
from simulated_steps import simulated_step


def test_every_action_is_one_interval_and_the_optimizer_another() -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    drawn = action_intervals(timeline, 2, most=100)
    assert [one.key for one in drawn.intervals] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "optimizer"]
    assert drawn.cut_s == 0.0
    spans = timeline.of_rank(2)
    first = spans.take((spans.action == timeline.actions.index("1F0")) & (spans.kind == SpanKind.COMPUTE))
    assert drawn.intervals[0].start_s == first.start_s.min()
    assert drawn.intervals[0].end_s == first.end_s.max()


def test_streams_are_busy_for_as_long_as_their_spans_and_coloured_by_what_they_do() -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    drawn = stream_intervals(timeline, 0, most=1000)
    assert {one.row for one in drawn.intervals} == {"compute", "fsdp", "pp"}
    assert {one.key for one in drawn.intervals} == {"matmul", "other", "optimizer", "waiting", "fsdp", "pp"}
    spans = timeline.of_rank(0)
    for kind, keys in ((SpanKind.COMMUNICATION, ("fsdp", "pp")), (SpanKind.WAIT, ("waiting",))):
        expected = (spans.end_s - spans.start_s)[spans.kind == kind].sum()
        assert sum(one.end_s - one.start_s for one in drawn.intervals if one.key in keys) == pytest.approx(expected)


def test_of_too_many_the_shortest_are_left_out_and_what_they_interrupted_becomes_one() -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    every = stream_intervals(timeline, 0, most=1000)
    drawn = stream_intervals(timeline, 0, most=30)
    assert every.cut_s == 0.0
    assert len(drawn.intervals) <= 30 < len(every.intervals)
    assert all(one.end_s - one.start_s > drawn.cut_s for one in drawn.intervals)
    # What is long is still there, if as a part of something longer.
    for one in every.intervals:
        if one.end_s - one.start_s > 4 * drawn.cut_s:
            same = [other for other in drawn.intervals if (other.row, other.key) == (one.row, one.key)]
            assert any(other.start_s <= one.start_s and one.end_s <= other.end_s for other in same)
