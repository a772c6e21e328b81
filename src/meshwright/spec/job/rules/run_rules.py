"""Rules between keys of a run: its steps, its checkpoints, and its budget of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.spec.job.sections import DEFAULT_WARMUP_STEPS
from meshwright.spec.problem import Problem

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_LEAST_HANG_LIMIT_S = 1.0
"""The launcher looks twice a second, and waits up to a second for what the ranks say."""


def step_problems(job: Job) -> Iterator[Problem]:
    """Yield what of the steps of a run does not fit together."""
    train, start, last = job.train, job.run.profile_start, job.train.last_step
    if start is not None and start > last:
        key = "train.stop_after" if last == train.stop_after else "train.steps"
        yield Problem(
            f"run.profile_start = {start} lies after the last step, {key} = {last}; must be from 1 to {last}",
            [{"run.profile_start": max(1, last - job.run.profile_steps + 1)}, {"run.profile_start": None}],
        )
    if train.stop_after is not None and train.stop_after > train.steps:
        yield Problem(
            f"train.stop_after = {train.stop_after} lies after train.steps = {train.steps}",
            [{"train.stop_after": train.steps}, {"train.stop_after": None}],
        )
    # A few steps for a trial are a job too: the default warmup is cut off, and check says so.
    if job.optimizer.warmup_steps > max(train.steps, DEFAULT_WARMUP_STEPS):
        yield Problem(
            f"optimizer.warmup_steps = {job.optimizer.warmup_steps} is more than train.steps = {train.steps}",
            [{"optimizer.warmup_steps": train.steps}],
            after=" or less",
        )
    if train.validation_interval and not job.data.validation_fraction:
        yield Problem(
            f"train.validation_interval = {train.validation_interval} but data.validation_fraction = 0 keeps no "
            "samples for validation",
            [{"train.validation_interval": 0}, {"data.validation_fraction": 0.02}],
        )


def hang_problems(job: Job) -> Iterator[Problem]:
    """Yield why the limit of a hang would end a run that trains."""
    limit_s = job.run.hang_limit_s
    if limit_s != "auto" and 0 < limit_s < _LEAST_HANG_LIMIT_S:
        yield Problem(
            f"run.hang_limit_s = {limit_s:g} is less than {_LEAST_HANG_LIMIT_S:g} s, which the launcher needs to "
            "distinguish a hang from a step",
            [{"run.hang_limit_s": "auto"}, {"run.hang_limit_s": 0.0}],
        )


def checkpoint_problems(job: Job) -> Iterator[Problem]:
    """Yield why no checkpoint could be the best one."""
    train, checkpoint = job.train, job.checkpoint
    if not checkpoint.keep_best:
        return
    measured = train.validation_interval
    saved = measured if checkpoint.interval == "auto" else checkpoint.interval
    if measured and (train.steps % measured == 0 or (saved and math.lcm(saved, measured) <= train.steps)):
        return
    interval = f"train.validation_interval = {measured}"
    what = "never measures one" if not measured else f"measures none at a step that is saved (every {saved})"
    yield Problem(
        f"checkpoint.keep_best = {checkpoint.keep_best} keeps those of the lowest validation loss, but {interval} "
        f"{what}",
        [{"train.validation_interval": saved or train.steps}, {"checkpoint.keep_best": 0}],
    )


def budget_problems(job: Job) -> Iterator[Problem]:
    """Yield what a budget of memory has nothing to apply to."""
    layout = job.layout
    if layout.memory_budget_bytes is not None and layout.search:
        yield Problem(
            f"layout.memory_budget_bytes = {layout.memory_budget_bytes} bounds what the blocks of a layout that is "
            "set save, and layout.search = true chooses another, which leaves planner.memory_margin free",
            [{"layout.memory_budget_bytes": None}, {"layout.search": False}],
        )
    elif layout.memory_budget_bytes is not None and layout.activation_checkpoint != "auto":
        yield Problem(
            f"layout.memory_budget_bytes = {layout.memory_budget_bytes} has nothing to apply with "
            f'layout.activation_checkpoint = "{layout.activation_checkpoint}"',
            [{"layout.activation_checkpoint": "auto"}, {"layout.memory_budget_bytes": None}],
        )
