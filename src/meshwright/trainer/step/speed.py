"""How fast the model could go on this device: what MFU is a share of."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Self

import torch

from meshwright.hardware.catalogue import load_device, recognise_device
from meshwright.spec.job.job import Job
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.trainer.launch.ranks import Ranks
from meshwright.units import KiB, format_count


@dataclass(frozen=True)
class SpeedLimit:
    """Model FLOPs of one step and the dense peak of all ranks; a None is unknown and leaves MFU empty."""

    flops_per_step: float | None
    peak_flops_per_s: float | None
    peak_name: str | None

    @classmethod
    def of(cls, job: Job, ranks: Ranks) -> Self:
        """Return the limit of `job` on these ranks, from the catalogue; nothing is guessed."""
        architecture = resolve_architecture(job.model)
        flops = None
        if architecture is not None:
            flops_per_token = model_spec(architecture).flops_per_token(job.train.seq_len)
            flops = flops_per_token * job.workload.global_batch_tokens
        device = None
        if job.cluster.device is not None:
            device = load_device(job.cluster.device)
        elif ranks.device.type == "cuda":
            device = recognise_device(torch.cuda.get_device_name(ranks.device))
        peak = None if device is None else device.peak_flops_per_s(job.precision.compute)
        if device is None or peak is None:
            return cls(flops, None, None)
        return cls(flops, peak * ranks.num_ranks, f"{device.name} {format_count(peak)}FLOP/s {job.precision.compute}")

    def mfu(self, step_s: float) -> float | None:
        """Return model FLOPs (no recompute) over the dense peak, 0 to 1; None when either is unknown."""
        if self.flops_per_step is None or self.peak_flops_per_s is None:
            return None
        return self.flops_per_step / step_s / self.peak_flops_per_s


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest bytes this rank has used: allocated on a CUDA device, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    unit_bytes = 1 if sys.platform == "darwin" else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
