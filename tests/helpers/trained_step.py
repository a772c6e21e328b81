"""The trainer's step as a program to trace: its builder, and the builder's arguments for a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.config.load import load_job
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.programs.trace_ranks import DeviceType
from meshwright.tracer.trace_job import DEFAULT, TraceOptions, trace_job
from meshwright.trainer.step.step_builder import TRAINER_STEP

BUILD = TRAINER_STEP.whole


def arguments_of(job_file: str | Path, *overrides: str) -> tuple[str, str]:
    """Return the resolved job as JSON, and the folder of its modules."""
    resolved = load_job(job_file, overrides)
    return resolved.job.model_dump_json(), str(resolved.folder)


def trace_file(
    job_file: str, overrides: Sequence[str] = (), *, device: DeviceType = "simgpu", how: TraceOptions = DEFAULT
) -> Traces:
    """Return the traces of all ranks of a job file."""
    return trace_job(TRAINER_STEP, load_job(job_file, overrides), device=device, how=how)
