"""What is compiled where a job leaves layout.compile out or says "auto", settled before ranks start.

Blocks on an accelerator, and on a processor where that pays.
"""

import os
from dataclasses import replace
from typing import NamedTuple

from meshwright.config.load import ResolvedJob
from meshwright.cost.compile_time import compile_s, num_kinds, saved_s
from meshwright.cost.layout_table import layout_table
from meshwright.errors import ConfigError, InfeasibleLayout, MeshwrightError
from meshwright.hardware.catalogue import CALIBRATED, with_example_rates
from meshwright.hardware.machine import cpp_compiler, num_usable_cores
from meshwright.log import progress
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.search.price import price
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import is_csv
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Manifest
from meshwright.units import counted, format_duration


class CompileChoice(NamedTuple):
    """What a job's device decides, and why."""

    compiles: bool
    reason: str

    @property
    def text(self) -> str:
        """Return one line for the log."""
        return f"layout.compile = {'blocks' if self.compiles else 'none'}, {self.reason}"


def settle_compile(
    resolved: ResolvedJob, num_ranks: int, *, is_accelerator: bool
) -> tuple[ResolvedJob, CompileChoice | None]:
    """Return the job with layout.compile true or false, and the choice; None where it is set or the planner's.

    Raises ConfigError where layout.async_tp needs compiled blocks and none are.
    """
    if not resolved.leaves_compile_open or resolved.job.layout.search:
        return resolved, None
    try:
        found = choose_compile(resolved, num_ranks, is_accelerator=is_accelerator)
    except InfeasibleLayout:
        # Refused where the number of ranks comes from, which is known there.
        return resolved, None
    if resolved.job.layout.async_tp and not found.compiles:
        raise ConfigError(
            f"layout.async_tp = true needs compiled blocks, and layout.compile, which is left open, compiles none "
            f"({found.reason}): set layout.compile to true, or layout.async_tp to false"
        )
    return _with_compile(resolved, found.compiles), found


def settled_on(resolved: ResolvedJob, cluster: Cluster) -> ResolvedJob:
    """Return the job as it would train on all devices of `cluster`."""
    # The device of this machine, where it is not calibrated, is that of the example which prices it.
    device = with_example_rates(cluster).device
    return settle_compile(resolved, cluster.num_devices, is_accelerator=device.torch_type == "cuda")[0]


def settle_for_training(resolved: ResolvedJob, num_ranks: int, resumed: Manifest | None = None) -> ResolvedJob:
    """Return the job with layout.compile settled for the devices of this machine, and log the choice.

    A run that is resumed keeps what it did, so that it computes the same bits.
    """
    if not resolved.leaves_compile_open:
        return resolved
    from meshwright.trainer.launch.ranks import choose_device_type

    if resumed is not None and resumed.attempts:
        return _with_compile(resolved, resumed.attempts[-1].layout.compile is True)
    is_accelerator = choose_device_type(resolved.job.run) == "cuda"
    is_asked = resolved.job.layout.compile == "auto"
    if not (is_accelerator or is_asked) and "RANK" in os.environ:
        # Ranks of several machines each ask themselves, and could choose differently.
        return resolved
    resolved, choice = settle_compile(resolved, num_ranks, is_accelerator=is_accelerator)
    if choice is not None and (choice.compiles or is_asked):
        progress.info("%s", choice.text)
    return resolved


def choose_compile(resolved: ResolvedJob, num_ranks: int, *, is_accelerator: bool) -> CompileChoice:
    """Return whether the blocks of a job on `num_ranks` ranks are compiled.

    An accelerator's compiled blocks never take longer, but for schedules with split backwards, which would run them
    twice. On a processor the compilation takes as long as many a run.
    """
    job, layout = resolved.job, resolved.job.layout.resolve(num_ranks).replace(compile=True)
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return CompileChoice(False, "since a graph break in a block of your own model would be an error")
    if not layout.compiles_blocks:
        return CompileChoice(False, "since these blocks have a part that stays eager, and recompute selectively")
    if is_accelerator:
        splits = layout.may_split_backward and not layout.async_tp
        twice = f"since {layout.schedule} splits backwards, and a compiled one would run twice"
        return CompileChoice(not splits, twice if splits else "on an accelerator")
    if job.train.exact_elastic:
        return CompileChoice(False, "since what pays depends on the ranks, and train.exact_elastic = true may not")
    if cpp_compiler() is None:
        return CompileChoice(False, "without a C++ compiler (`meshwright doctor`)")
    return _on_processor(resolved, layout, architecture)


def _on_processor(resolved: ResolvedJob, layout: Layout, architecture: LlamaArchitecture) -> CompileChoice:
    try:
        step_s = _eager_step_s(resolved, layout)
    except MeshwrightError as error:
        return CompileChoice(False, f"since its gain is unknown ({error})")
    steps = resolved.job.train.steps
    takes_s = compile_s(num_kinds(architecture), layout.num_ranks, num_usable_cores())
    wins_s = saved_s(steps, step_s)
    return CompileChoice(
        wins_s > takes_s,
        f"since {counted(steps, 'step')} of about {format_duration(step_s)} would save {format_duration(wins_s)} and "
        f"compiling takes {format_duration(takes_s)}",
    )


def _eager_step_s(resolved: ResolvedJob, layout: Layout) -> float:
    """Return the predicted step on this machine, in a layout that formulas can price."""
    eager = layout.replace(compile=False, async_tp=False)
    eager = eager.replace(schedule=Layout().schedule) if is_csv(layout) else eager
    eager = eager.replace(activation_checkpoint="none") if eager.activation_checkpoint == "auto" else eager
    request = plan_request(_with_compile(_here(resolved, layout.num_ranks), False), Options(takes_example=True))
    return float(price(layout_table([eager]), request, only_fitting=False).total_s[0])


def _here(resolved: ResolvedJob, num_ranks: int) -> ResolvedJob:
    """Return the job on the processors of this machine, or of the shipped example where it is not calibrated."""
    job = resolved.job
    cluster = job.cluster.replace(name=CALIBRATED, device=None, num_devices=num_ranks)
    return replace(resolved, job=job.replace(cluster=cluster))


def _with_compile(resolved: ResolvedJob, compiles: bool) -> ResolvedJob:
    layout = resolved.job.layout.replace(compile=compiles)
    return replace(resolved, job=resolved.job.replace(layout=layout))
