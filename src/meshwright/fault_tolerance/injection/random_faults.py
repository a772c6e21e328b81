"""random_faults(): a schedule of faults that a seed determines."""

import random
from collections.abc import Sequence
from typing import Final

from meshwright.errors import ConfigError
from meshwright.spec.fault import INJECTED, NUMBER_FAULTS, PHASES, Fault, FaultKind
from meshwright.spec.job.job import Job
from meshwright.spec.storage_fault import DAMAGES, DISK_FAULTS

_SLOWER: Final = 3.0
_SLOWER_CALL_S: Final = 0.02
_STEP_PHASES: Final = ("data", "forward", "backward", "gradients", "optimizer", "agree")
"""Those that every step has."""
_MAX_CALL: Final = 6
"""Any rank that saves has more calls."""


def random_faults(num_faults: int, seed: int, *, job: Job, num_ranks: int) -> tuple[Fault, ...]:
    """Return faults that a run survives without checks, on any rank, in any phase, one at most in each step from 2.

    Storage is damaged, and fails, only where the job saves checkpoints, and keeps two. Raises ConfigError for more
    faults than there are such steps.
    """
    num_steps = job.train.steps
    if not 1 <= num_faults < num_steps:
        raise ConfigError(
            f"{num_faults} random faults in {num_steps} steps: there is one at most in each step after the first: draw "
            f"1 to {num_steps - 1}, or set train.steps to {num_faults + 1} or more"
        )
    draw = random.Random(seed)
    faults: list[Fault] = []
    for step in sorted(draw.sample(range(2, num_steps + 1), num_faults)):
        kind, rank = draw.choice(_kinds(job, num_ranks, step)), draw.randrange(num_ranks)
        restarts = bool(faults) and _restarts(faults[-1])
        if kind == "slow-rank":
            faults.append(Fault(kind=kind, rank=rank, step=step, argument=_SLOWER))
        elif kind in DISK_FAULTS or (kind == "crash" and draw.random() < 1 / len(PHASES)):
            argument = _SLOWER_CALL_S if kind == "slow-disk" else float(draw.randint(1, _MAX_CALL))
            faults.append(Fault(kind=kind, rank=rank, step=step, phase="checkpoint", argument=argument))
        elif restarts and draw.random() < 1 / len(PHASES):
            # In the attempt that the fault before it brings about.
            faults.append(Fault(kind=kind, rank=rank, step=(faults[-1].step or 2) - 1, phase="restore"))
        else:
            faults.append(Fault(kind=kind, rank=rank, step=step, phase=draw.choice(_STEP_PHASES)))
    return tuple(faults)


def _kinds(job: Job, num_ranks: int, step: int) -> Sequence[FaultKind]:
    """Return the kinds that can happen in a step."""
    # Known while the run trains only ("auto"), or of one of several independent replicas, which only one of them saves.
    is_known = job.checkpoint.interval != "auto" and not job.replicas.independent
    interval, left_out = int(job.checkpoint.interval) if is_known else 0, {*NUMBER_FAULTS}
    if not interval:
        left_out |= {*DISK_FAULTS}
    if not interval or job.checkpoint.keep == 1 or step <= 2 * interval:
        left_out |= {*DAMAGES}
    if num_ranks == 1:
        left_out.add("swap-shards")
    return [kind for kind in INJECTED if kind not in left_out]


def _restarts(fault: Fault) -> bool:
    """Return whether a fault ends the attempt for certain, and not only while it restores."""
    return fault.kind != "slow-rank" and not fault.is_of_disk and fault.phase != "restore"
