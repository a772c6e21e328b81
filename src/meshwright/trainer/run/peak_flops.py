"""PeakFlops: what the MFU of a run refers to, and the peak memory of a rank."""

from dataclasses import dataclass
from typing import Self

import torch

from meshwright.hardware.catalogue import load_device, recognise_device
from meshwright.hardware.machine import peak_resident_bytes
from meshwright.spec.job.job import Job
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.step.workload import MATMUL_DTYPE
from meshwright.trainer.launch.ranks import Ranks
from meshwright.units import format_count


@dataclass(frozen=True)
class PeakFlops:
    """Model FLOPs of one step and dense peak FLOP/s of all ranks; None if unknown, then MFU is None too."""

    flops_per_step: float | None
    peak_flops_per_s: float | None
    peak_name: str | None

    @classmethod
    def of(cls, job: Job, ranks: Ranks) -> Self:
        """Return the FLOPs of `job` and the peak of these ranks, from the catalogue."""
        architecture = resolve_architecture(job.model)
        flops = None
        if architecture is not None:
            flops_per_token = adapted_model(model_spec(architecture), job.adapter).flops_per_token(job.train.seq_len)
            flops = flops_per_token * job.workload.global_batch_tokens
        device = None
        if job.cluster.device is not None:
            device = load_device(job.cluster.device)
        elif ranks.device.type == "cuda":
            device = recognise_device(torch.cuda.get_device_name(ranks.device))
        # As in a plan and a report: the peak of the blocks' matmuls, float8's where they are in float8.
        dtype = MATMUL_DTYPE[job.precision.matmuls]
        peak = None if device is None else device.peak_flops_per_s(dtype)
        if device is None or peak is None:
            return cls(flops, None, None)
        return cls(flops, peak * ranks.num_ranks, f"{device.name} {format_count(peak)}FLOP/s {dtype}")

    def mfu(self, step_s: float) -> float | None:
        """Return MFU, 0 to 1: model FLOPs without recomputation over the dense peak; None if either is unknown."""
        if self.flops_per_step is None or self.peak_flops_per_s is None:
            return None
        return self.flops_per_step / step_s / self.peak_flops_per_s


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: allocated on a CUDA device, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
