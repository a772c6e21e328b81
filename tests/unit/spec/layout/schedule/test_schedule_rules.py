"""What a schedule asks of a layout is said with the numbers that would do, and those do."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.layout.layout import SCHEDULES, Layout
from meshwright.spec.layout.schedule.schedule import build_schedule, check_schedule
from meshwright.spec.layout.schedule.schedule_rules import schedule_problems


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "problem"),
    [
        (Layout(pp=4), 3, 'layout.schedule = "1F1B" cannot run 3 microbatches in a step: there are 4 stages, and it '
         "needs as many microbatches or more. Take 4 of them: set train.global_batch_size to 4"),
        (Layout(pp=4, schedule="DualPipeV", dp_shard=2), 7, "there are 8 stages, and it needs as many microbatches or "
         "more. Take 8 of them: set train.global_batch_size to 16"),
        (Layout(pp=4, schedule="Interleaved1F1B", dp_shard=2, microbatch_size=3), 9, "layout.pp = 4 makes 2 rounds of "
         "them, which have to be of one size. Take 8 or 10 of them: set train.global_batch_size to 48 or 60"),
        (Layout(pp=2, microbatch_size=4), 1, "set train.global_batch_size to 8, or layout.microbatch_size to 1 or 2"),
        (Layout(pp=2, schedule="InterleavedZeroBubble"), 5, "Take 4 or 6 of them"),
        (Layout(pp=2, virtual_stages=2), 4, 'layout.virtual_stages = 2, but layout.schedule = "1F1B" has one stage on '
         "each pipeline rank: set layout.virtual_stages to 1, or layout.schedule to \"Interleaved1F1B\" or "),
        (Layout(pp=2, schedule="ZBVZeroBubble", virtual_stages=3), 4, "exactly two stages on each pipeline rank: set "
         "layout.virtual_stages to 2"),
        (Layout(virtual_stages=2, schedule="LoopedBFS"), 4, "layout.virtual_stages = 2 cuts up a pipeline rank, but "
         "layout.pp = 1: set layout.virtual_stages to 1, or layout.pp to 2"),
        (Layout(schedule="1f1b"), 4, 'layout.schedule = "1f1b" is not known (did you mean 1F1B?): choose one of GPipe, '
         "1F1B, "),
    ],
)  # fmt: skip
def test_a_problem_names_what_would_do(layout: Layout, num_microbatches: int, problem: str) -> None:
    problems = schedule_problems(layout, num_microbatches)
    assert len(problems) == 1
    assert problem in problems[0]


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 13), st.integers(1, 3), st.integers(1, 3))
def test_the_numbers_that_would_do_do(name: str, pp: int, num_microbatches: int, dp: int, size: int) -> None:
    layout = Layout(pp=pp, schedule=name, dp_shard=dp, microbatch_size=size)
    problems = schedule_problems(layout, num_microbatches)
    choices = [num_microbatches]
    if problems:
        found = re.search(r"Take ([0-9 or]+) of them: set train.global_batch_size to ([0-9 or]+)(,|$)", problems[0])
        assert found is not None
        choices = [int(number) for number in found[1].split(" or ")]
        assert [int(number) for number in found[2].split(" or ")] == [number * dp * size for number in choices]
        assert num_microbatches not in choices
    for choice in choices:
        assert not schedule_problems(layout, choice)
        check_schedule(build_schedule(layout, choice))


def test_a_file_is_judged_when_it_is_read() -> None:
    assert schedule_problems(Layout(pp=3, schedule="mine.csv", virtual_stages=5), 7) == []
