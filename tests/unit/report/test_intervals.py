"""What is drawn of a timeline: an interval for each action, runs of equal spans on each stream."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.report.intervals import action_intervals, stream_intervals
from meshwright.spec.timeline import SpanKind
from simulated_steps import simulated_step


def test_every_action_is_one_interval_and_the_optimizer_another() -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    drawn = action_intervals(timeline, 2, most=100)
    assert [one.key for one in drawn.intervals] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "optimizer"]
    assert drawn.share == 1.0
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


def test_of_too_many_the_longest_are_kept_in_order_with_their_share() -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    every = stream_intervals(timeline, 0, most=1000).intervals
    drawn = stream_intervals(timeline, 0, most=10)
    assert len(drawn.intervals) == 10
    took = sorted((one.end_s - one.start_s for one in every), reverse=True)
    assert drawn.share == pytest.approx(sum(took[:10]) / sum(took))
    assert [one for one in every if one in drawn.intervals] == drawn.intervals
    assert np.all(np.array([one.end_s - one.start_s for one in drawn.intervals]) > 0)
