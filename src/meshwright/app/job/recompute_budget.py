"""What a job leaves open, settled before any rank starts: its layout, and what its blocks save ("auto")."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.config.load import ResolvedJob
from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import with_example_rates
from meshwright.hardware.choice import cluster_of_section
from meshwright.planner.plan import make_plan
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.recompute_choice import blocks_of_pipeline_ranks, tensor_budget_bytes, with_checkpoints
from meshwright.simulator.memory.choose_checkpoints import Checkpoints, Need, choose_checkpoints
from meshwright.simulator.memory.memory_curve import in_phase
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.machine.device import Device
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.run.run import Manifest
from meshwright.spec.step.estimate import Estimate
from meshwright.spec.trace.trace import NONE, Trace
from meshwright.tracer.programs.trace_ranks import device_type_of
from meshwright.tracer.trace_job import trace_job
from meshwright.trainer.launch.ranks import choose_device_type
from meshwright.trainer.step.step_builder import TRAINER_STEP


class SettledLayout(NamedTuple):
    """What replaces what a job leaves open."""

    layout: Layout
    estimate: Estimate | None = None
    """What the planner expects of it; None where a run that is resumed has none."""

    def resolve(self, resolved: ResolvedJob) -> ResolvedJob:
        """Return the job with the layout set."""
        layout = LayoutRequest.model_validate(self.layout.model_dump())
        return replace(resolved, job=resolved.job.replace(layout=layout))


def plan_layout(resolved: ResolvedJob, num_ranks: int | None, resumed: Manifest | None) -> SettledLayout:
    """Return the layout of a job that searches for one: that of the run which is resumed, or else the planner's pick.

    `num_ranks` are the ranks asked for; None takes the cluster's devices. Raises ConfigError for a job that cannot be
    planned, and for other ranks than the run which is resumed has.
    """
    if resumed is not None and resumed.attempts:
        layout = resumed.attempts[-1].layout
        if num_ranks not in (None, layout.num_ranks):
            raise ConfigError(
                f"--ranks {num_ranks}: the run in {resolved.run_dir} has a layout of {layout.num_ranks} ranks, which a "
                "resume keeps: leave --ranks out, or set layout.search to false and the degrees by hand"
            )
        return SettledLayout(layout, resumed.estimate)
    request = plan_request(resolved, Options())
    if num_ranks is not None:
        request = request.with_setup(cluster=request.cluster.with_num_devices(num_ranks))
    if resolved.job.planner.simulate:
        from meshwright.app.simulated.simulated_plan import by_simulation

        pick = by_simulation(resolved, request)
    else:
        pick = make_plan(request, min_scored=0).pick
    return SettledLayout(pick.layout, pick.estimate)


def budget_layout(resolved: ResolvedJob, num_ranks: int, resumed: Manifest | None) -> SettledLayout:
    """Return the layout of a job with activation_checkpoint = "auto": what its blocks save in the run that is resumed
    by as many ranks, or else what a traced step has memory for; raises InfeasibleLayout where nothing fits.
    """
    if resumed is not None and resumed.attempts and resumed.attempts[-1].layout.num_ranks == num_ranks:
        return SettledLayout(resumed.attempts[-1].layout)
    return SettledLayout(settle_checkpoints(resolved, num_ranks))


_FLOPS_PER_BYTE = 100.0
"""What a device computes while it moves a byte: from some tens to 300. It decides only whether selective comes before
full, which is seldom close: selective recomputes memory-bound operators and no matmuls."""


def settle_checkpoints(resolved: ResolvedJob, num_ranks: int, device: Device | None = None) -> Layout:
    """Return the layout of a job of `num_ranks` ranks with what each block saves, as its traced step has memory for.

    `device` is in place of the job's own. Raises InfeasibleLayout if nothing fits.
    """
    job, device = resolved.job, device or _device(resolved.job, num_ranks)
    layout = job.layout.resolve(num_ranks)
    budget_bytes = tensor_budget_bytes(device, job.layout.memory_budget_bytes)

    def measure(saves: Checkpoints) -> list[Need]:
        traces = trace_job(TRAINER_STEP, _with_saves(resolved, saves), num_ranks, device=device_type_of(device))
        needs = {rank: _need(trace) for rank, trace in traces.traces.items()}
        size = num_ranks // layout.pp
        classes = [set(traces.class_of_rank[at : at + size].tolist()) for at in range(0, num_ranks, size)]
        return [max((needs[rank] for rank in ranks), key=lambda need: need.peak_bytes) for ranks in classes]

    return with_checkpoints(layout, choose_checkpoints(_blocks_of_ranks(job, layout), budget_bytes, measure))


def _with_saves(resolved: ResolvedJob, saves: Checkpoints) -> ResolvedJob:
    layout = resolved.job.layout.replace(
        activation_checkpoint="none", activation_checkpoint_blocks=saves, memory_budget_bytes=None
    )
    return replace(resolved, job=resolved.job.replace(layout=layout))


def _need(trace: Trace) -> Need:
    moved = [one.read_bytes + one.written_bytes for one in trace.signatures]
    work = np.maximum([one.flops / _FLOPS_PER_BYTE for one in trace.signatures], moved)
    again = in_phase(trace, "recompute") & (trace.records.signature != NONE)
    return Need(int(trace.live_bytes().max()), float(work[trace.records.signature[again]].sum()))


def _blocks_of_ranks(job: Job, layout: Layout) -> Sequence[Sequence[int]]:
    architecture = resolve_architecture(job.model)
    assert architecture is not None, "refused with the job's other mistakes (spec/job/validity.py)"
    return blocks_of_pipeline_ranks(layout, model_spec(architecture), job.train.seq_len, job.num_microbatches(layout))


def _device(job: Job, num_ranks: int) -> Device:
    """Return what the job runs on; this machine's memory is shared by its ranks. Raises ConfigError if it runs on GPUs
    without a name.
    """
    cluster = cluster_of_section(job.cluster).with_num_devices(num_ranks)
    device = with_example_rates(cluster).device
    if device.torch_type == "cpu" and choose_device_type(job.run) == "cuda":
        raise ConfigError(
            'layout.activation_checkpoint = "auto" chooses for the memory of what the job runs on: CUDA devices that '
            f'the catalogue does not know, and cluster.name = "{job.cluster.name}" is a processor: set cluster.device '
            '(see `meshwright list devices`), or cluster.name to a cluster of them, or run.device to "cpu"'
        )
    return device
