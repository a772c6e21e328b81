"""What a schedule known by name asks of the layout and of the number of microbatches; the rules are torch's."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.schedule_csv import is_csv
from meshwright.units import counted

IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules whose microbatches go round in equal rounds."""
AS_MANY_AS_STAGES = ("1F1B", "DualPipeV")
"""Schedules that need as many microbatches as there are stages."""
_LEAST_ALIKE = 0.6
"""Of difflib's ratio, for a name that may be meant."""


def schedule_problems(layout: Layout, num_microbatches: int) -> list[str]:
    """Return why layout.schedule cannot run `num_microbatches` in a step, one sentence each; empty when it can.

    What a file holds is checked when it is read.
    """
    if unknown := name_problems(layout):
        return unknown
    # A number of stages that is wrong anyhow is no reason to change the batch.
    return [*stage_problems(layout)] or [*_microbatch_problems(layout, num_microbatches)]


def name_problems(layout: Layout) -> list[str]:
    """Return that layout.schedule is neither a schedule nor a file, whatever else the layout says; empty if it is."""
    if layout.schedule in SCHEDULES or is_csv(layout):
        return []
    lower = {name.lower(): name for name in SCHEDULES}
    near = get_close_matches(layout.schedule.lower(), lower, n=1, cutoff=_LEAST_ALIKE)
    meant = f" (did you mean {lower[near[0]]}?)" if near else ""
    return [
        f'layout.schedule = "{layout.schedule}" is not known{meant}: choose one of {", ".join(SCHEDULES)}, '
        "or name a file that ends in .csv"
    ]


def stage_problems(layout: Layout) -> Iterator[str]:
    """Yield why a pipeline rank cannot hold as many stages as layout.virtual_stages says."""
    given = f"layout.virtual_stages = {layout.stages_per_rank}"
    if layout.pp == 1 and layout.stages_per_rank > 1:
        other = "" if [*stage_problems(layout.replace(pp=2))] else ", or layout.pp to 2"
        yield f"{given} cuts up a pipeline rank, but layout.pp = 1: set layout.virtual_stages to 1{other}"
    elif layout.pp > 1 and layout.schedule in SINGLE_STAGE_SCHEDULES and layout.stages_per_rank > 1:
        yield (
            f'{given}, but layout.schedule = "{layout.schedule}" has one stage on each pipeline rank: '
            f"set layout.virtual_stages to 1, or layout.schedule to one of {', '.join(LOOPED_SCHEDULES)}"
        )
    elif layout.pp > 1 and layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        yield (
            f'{given}, but layout.schedule = "{layout.schedule}" has exactly two stages on each pipeline rank: '
            "set layout.virtual_stages to 2"
        )


def _microbatch_problems(layout: Layout, num_microbatches: int) -> Iterator[str]:
    if _can_run(layout, num_microbatches):
        return
    if layout.schedule in IN_ROUNDS:
        rounds = num_microbatches // layout.pp
        rule = f"layout.pp = {layout.pp} makes {rounds} rounds of them, which have to be of one size"
    else:
        rule = f"there are {layout.num_stages} stages, and it needs as many microbatches or more"
    choices = _nearest_counts(layout, num_microbatches)
    sequences = [number * layout.dp * layout.microbatch_size for number in choices]
    given = counted(num_microbatches, "microbatch", "microbatches")
    yield (
        f'layout.schedule = "{layout.schedule}" cannot run {given} in a step: {rule}. '
        f"Take {_either(choices)} of them: set train.global_batch_size to {_either(sequences)}, "
        f"or change layout.microbatch_size = {layout.microbatch_size}"
    )


def _can_run(layout: Layout, num_microbatches: int) -> bool:
    if layout.pp == 1:
        return True
    if layout.schedule in IN_ROUNDS:
        return num_microbatches % max(1, num_microbatches // layout.pp) == 0
    return layout.schedule not in AS_MANY_AS_STAGES or num_microbatches >= layout.num_stages


def _nearest_counts(layout: Layout, num_microbatches: int) -> list[int]:
    """Return the numbers of microbatches next to one that cannot run: one below, if there is one, and one above."""
    if layout.schedule in AS_MANY_AS_STAGES:
        return [layout.num_stages]
    # A multiple of the stages always runs, so the way up ends.
    last = num_microbatches + layout.num_stages
    ways = range(num_microbatches - 1, 0, -1), range(num_microbatches + 1, last + 1)
    return [found for way in ways if (found := next(filter(lambda n: _can_run(layout, n), way), None)) is not None]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
