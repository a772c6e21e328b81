"""What a schedule known by name asks of the layout and of the number of microbatches; the rules are torch's."""

from collections.abc import Iterator
from difflib import get_close_matches

from meshwright.spec.layout.layout import LOOPED_SCHEDULES, SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.action import is_csv
from meshwright.spec.problem import Fix, Problem
from meshwright.units import counted

IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules whose microbatches go round in equal rounds."""
AS_MANY_AS_STAGES = ("1F1B", "DualPipeV")
"""Schedules that need as many microbatches as there are stages."""
_VIRTUAL = "layout.virtual_stages"
_MAX_TRIED = 64
"""Microbatch sizes that are tried, from the largest down."""
_LEAST_ALIKE = 0.6
"""Of difflib's ratio, for a name that may be meant."""


def schedule_problems(
    layout: Layout, num_microbatches: int, batch_key: tuple[str, int] = ("train.global_batch_size", 1)
) -> list[Problem]:
    """Return why layout.schedule cannot run `num_microbatches` in a step, one sentence each; empty when it can.

    `batch_key` is the key that sets the batch, and how much of it is one sequence. What a file holds is checked when it
    is read.
    """
    if unknown := name_problems(layout):
        return unknown
    # A number of stages that is wrong anyhow is no reason to change the batch.
    return [*stage_problems(layout)] or [*_microbatch_problems(layout, num_microbatches, batch_key)]


def idle_schedule_note(layout: Layout) -> str:
    """Return that layout.schedule, of which another than the default is set, changes nothing; "" where it may."""
    if layout.pp > 1 or layout.schedule == Layout.model_fields["schedule"].default:
        return ""
    return f'layout.schedule = "{layout.schedule}" has no effect with layout.pp = 1: there is no pipeline'


def name_problems(layout: Layout) -> list[Problem]:
    """Return that layout.schedule is neither a schedule nor a file, whatever else the layout says; empty if it is."""
    if layout.schedule in SCHEDULES or is_csv(layout):
        return []
    lower = {name.lower(): name for name in SCHEDULES}
    near = get_close_matches(layout.schedule.lower(), lower, n=1, cutoff=_LEAST_ALIKE)
    meant = f" (did you mean {lower[near[0]]}?)" if near else ""
    return [
        Problem(
            f'layout.schedule = "{layout.schedule}" is not known{meant}',
            otherwise=f"choose one of {', '.join(SCHEDULES)}, or name a file that ends in .csv",
        )
    ]


def stage_problems(layout: Layout) -> Iterator[Problem]:
    """Yield why a pipeline rank cannot hold as many stages as layout.virtual_stages says."""
    given = f"layout.virtual_stages = {layout.stages_per_rank}"
    if layout.pp == 1 and layout.stages_per_rank > 1:
        deeper = [] if [*stage_problems(layout.replace(pp=2))] else [{"layout.pp": 2}]
        yield Problem(f"{given} cuts up a pipeline rank, but layout.pp = 1", [{_VIRTUAL: 1}, *deeper])
    elif layout.pp > 1 and layout.schedule in SINGLE_STAGE_SCHEDULES and layout.stages_per_rank > 1:
        yield Problem(
            f'{given}, but layout.schedule = "{layout.schedule}" has one stage on each pipeline rank',
            [{_VIRTUAL: 1}, *({"layout.schedule": name} for name in LOOPED_SCHEDULES)],
            most=len(LOOPED_SCHEDULES),
        )
    elif layout.pp > 1 and layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        yield Problem(
            f'{given}, but layout.schedule = "{layout.schedule}" has exactly two stages on each pipeline rank',
            [{_VIRTUAL: 2}],
        )


def _microbatch_problems(layout: Layout, num_microbatches: int, batch_key: tuple[str, int]) -> Iterator[Problem]:
    if _can_run(layout, num_microbatches):
        return
    if layout.schedule in IN_ROUNDS:
        rounds = num_microbatches // layout.pp
        rule = f"layout.pp = {layout.pp} makes {rounds} rounds of them, which have to be of one size"
    else:
        rule = f"there are {layout.num_stages} stages, and it needs as many microbatches or more"
    choices = _nearest_counts(layout, num_microbatches)
    either = " or ".join(map(str, choices))
    key, per_sequence = batch_key
    given = counted(num_microbatches, "microbatch", "microbatches")
    batches: list[Fix] = [{key: number * layout.dp * layout.microbatch_size * per_sequence} for number in choices]
    yield Problem(
        f'layout.schedule = "{layout.schedule}" cannot run {given} in a step: {rule}. Take {either} of them',
        [*batches, *_smaller_microbatches(layout, num_microbatches)],
    )


def _smaller_microbatches(layout: Layout, num_microbatches: int) -> Iterator[Fix]:
    """Yield sizes that cut the same batch into microbatches of a number that can run."""
    sequences = num_microbatches * layout.microbatch_size
    for size in range(min(layout.microbatch_size - 1, _MAX_TRIED), 0, -1):
        if sequences % size == 0 and _can_run(layout, sequences // size):
            yield {"layout.microbatch_size": size}


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
