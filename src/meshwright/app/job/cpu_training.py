"""What a job does otherwise on a CPU, known before it starts and without torch."""

from meshwright.hardware.catalogue import LOCAL
from meshwright.hardware.machine import nvidia_driver
from meshwright.spec.job.job import Job


def trains_on_cpu(job: Job) -> bool:
    """Return whether the job would train on this machine's CPU; False where that is not known without torch."""
    if job.cluster.name != LOCAL:
        return False
    is_without_gpu = job.cluster.device is None and nvidia_driver() is None
    return job.run.device == "cpu" or (job.run.device == "auto" and is_without_gpu)


def int8_note(job: Job) -> str | None:
    """Return that an update with int8 states is slow on a CPU; None where the job has none, or another device."""
    if job.optimizer.state_dtype != "int8" or not trains_on_cpu(job):
        return None
    return (
        'optimizer.state_dtype = "int8" is for the memory of GPUs: to quantize on a CPU can take longer than the rest '
        "of the step, and is not predicted"
    )
