"""What Meshwright predicts of a job on this GPU, and the FLOPs by which MFU is measured."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

import meshwright as mw
from meshwright.hardware.catalogue import recognise_device
from meshwright.spec.job.job import Job
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec


class Predicted(NamedTuple):
    """Of one step."""

    step_s: float
    peak_bytes: int
    """The most that is allocated."""


def device_name(device: str) -> str:
    """Return what the hardware calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def predict(job_file: Path, overrides: tuple[str, ...], device: str) -> Predicted | None:
    """Return what `meshwright plan` says of the job's own layout; None where the catalogue lacks the device."""
    found = recognise_device(device_name(device)) if device == "cuda" else None
    if found is None:
        return None
    given = mw.plan(str(job_file), *overrides, cluster=f"{found.name}:1").given
    if given is None:
        return None
    return Predicted(given.estimate.step.total_s, given.estimate.memory.allocated_bytes)


def peak_s(job: Job, device: str) -> float | None:
    """Return the seconds that the model FLOPs of a step take at the peak in bfloat16: MFU is these over the step's.

    None where the catalogue lacks the device.
    """
    found = recognise_device(device_name(device)) if device == "cuda" else None
    peak = None if found is None else found.peak_flops_per_s("bfloat16")
    architecture = resolve_architecture(job.model)
    if peak is None or architecture is None:
        return None
    flops = model_spec(architecture).flops_per_token(job.train.seq_len) * job.workload.global_batch_tokens
    return flops / peak
