"""This machine's CUDA devices: refused where there are too few, and named in the job where the catalogue knows them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.hardware.catalogue import LOCAL, recognise_device

if TYPE_CHECKING:
    from meshwright.config.load import ResolvedJob
    from meshwright.spec.machine.device import Device


def require_cuda(num_ranks: int = 1) -> None:
    """Raise ConfigError where torch does not see a CUDA device for each of `num_ranks`."""
    import torch

    from meshwright.errors import ConfigError
    from meshwright.units import counted

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda, but torch {torch.__version__} sees no CUDA device: "
            "leave --device out or give cpu; `meshwright doctor` lists what is missing"
        )
    present = torch.cuda.device_count()
    if num_ranks > present:
        raise ConfigError(
            f"--device cuda, but {counted(num_ranks, 'rank')} need as many CUDA devices and torch sees {present}: "
            f"give layouts of {present} or fewer, or leave --device out"
        )


def local_gpu(resolved: "ResolvedJob") -> "Device | None":
    """Return the catalogue's entry of the GPUs that a job runs on; None on a CPU, and for GPUs unknown to it."""
    from meshwright.trainer.launch.ranks import choose_device_type

    if choose_device_type(resolved.job.run) != "cuda":
        return None
    import torch

    return recognise_device(torch.cuda.get_device_name())


def with_local_gpu(resolved: "ResolvedJob") -> "ResolvedJob":
    """Return the job with cluster.device set to the GPUs that it runs on, where it names no machine and they are known;
    a layout that is searched is one for all of them.

    What is predicted of the run, here and in a report of it elsewhere, is then of these GPUs.
    """
    import torch

    section = resolved.job.cluster
    if section.name != LOCAL or section.device is not None or (device := local_gpu(resolved)) is None:
        return resolved
    section = section.replace(device=device.name)
    if resolved.job.layout.search and section.num_devices is None:
        section = section.replace(num_devices=torch.cuda.device_count())
    return replace(resolved, job=resolved.job.replace(cluster=section))
