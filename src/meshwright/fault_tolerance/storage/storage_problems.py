"""storage_problems(): why storage faults cannot be injected into a job's run; needs no torch."""

from collections.abc import Iterator, Sequence

from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.storage_fault import DAMAGES, DISK_FAULTS, DISK_PHASES


def storage_problems(faults: Sequence[Fault], job: Job, num_ranks: int) -> list[str]:
    """Return why storage faults cannot be injected into this job's run, one message each."""
    problems: list[str] = []
    for fault in faults:
        if fault.kind in DAMAGES:
            problems += _damage_problems(fault, job, num_ranks)
        elif fault.kind in DISK_FAULTS or fault.is_of_disk:
            problems += _disk_problems(fault)
        elif fault.kind == "crash" and fault.argument:
            problems.append(
                f"argument = {fault.argument:g} of a crash: counts calls on a checkpoint's files: set phase to "
                f"{' or '.join(DISK_PHASES)}, or leave it out"
            )
    return problems


def _damage_problems(fault: Fault, job: Job, num_ranks: int) -> Iterator[str]:
    section = job.checkpoint
    if not section.interval:
        yield f"checkpoint.interval = 0: {fault.kind} damages a checkpoint: set it to 1 or more"
    if section.keep == 1 and not section.keep_every:
        yield f"checkpoint.keep = 1: after {fault.kind} of the newest checkpoint none is left: set it to 2 or more"
    if fault.kind == "swap-shards" and num_ranks == 1:
        yield 'kind = "swap-shards": exchanges the files of two ranks, and there is one: use 2 ranks or more'


def _disk_problems(fault: Fault) -> Iterator[str]:
    if fault.phase not in (None, *DISK_PHASES):
        yield f'phase = "{fault.phase}" of {fault.kind}: must be one of {", ".join(DISK_PHASES)}'
    if fault.kind == "no-space" and fault.phase == "restore":
        yield 'phase = "restore" of no-space: reading needs no space: use checkpoint, or io-error'
    if fault.kind == "slow-disk" and fault.argument <= 0:
        yield f"argument = {fault.argument:g} of a slow-disk: say how many seconds each call takes longer, such as 0.1"
