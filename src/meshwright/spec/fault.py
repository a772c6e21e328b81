"""Fault: something that goes wrong on one rank, as data: what simulates it and what makes it happen read the same."""

from collections.abc import Iterable
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.storage_fault import DAMAGES, DISK_FAULTS, DISK_PHASES, DamageKind, DiskFaultKind

FaultKind = Literal[
    "slow-rank",
    "slow-link",
    "crash",
    "hang",
    "drop-message",
    "segfault",
    "abort",
    "exception",
    "terminate",
    "stop",
    "hold-gil",
    DamageKind,
    DiskFaultKind,
    "flip-parameter",
    "flip-gradient",
    "nan-gradient",
    "loss-spike",
]
"""slow-rank computes, and slow-link communicates, so many times slower; crash ends the process at once, as SIGKILL
does; hang stops its training loop, while other threads run; drop-message never sends what others then wait for.
Segfault and abort end the process by the signals of broken native code, exception by an error that another attempt may
pass, such as a device's, terminate by SIGTERM, as a preemption of its machine; stop freezes the whole process
(SIGSTOP), hold-gil all of its Python threads. Flip-parameter and flip-gradient change one bit of the largest number of
the rank's largest tensor, after gradients are reduced; nan-gradient makes it NaN; loss-spike multiplies the outputs of
the rank's last stage in one forward, so that its loss and its gradients before the reduction are wrong. Those of
storage are in storage_fault.py."""

SIMULATED: tuple[FaultKind, ...] = ("slow-rank", "slow-link", "crash", "hang", "drop-message")
"""Kinds that a simulation knows."""
NUMBER_FAULTS: tuple[FaultKind, ...] = ("flip-parameter", "flip-gradient", "nan-gradient", "loss-spike")
"""Injected kinds that no rank stops for: it computes on with wrong numbers."""
INJECTED: tuple[FaultKind, ...] = (
    "crash",
    "segfault",
    "abort",
    "exception",
    "terminate",
    "hang",
    "hold-gil",
    "stop",
    "slow-rank",
    *DAMAGES,
    *DISK_FAULTS,
    *NUMBER_FAULTS,
)
"""Kinds that `meshwright chaos` makes happen."""
PHASE_OF: dict[FaultKind, str] = {
    "slow-rank": "gradients",
    "flip-gradient": "gradients",
    "nan-gradient": "gradients",
}
"""Phase in which a kind is injected where none is given, if not at the start of the step."""
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "agree", "validation", "checkpoint", "restore")
"""Where in a step a fault can be injected: as the rank enters that phase. restore is that of the next attempt after the
step was finished."""


class Fault(Frozen):
    """One fault."""

    kind: FaultKind
    rank: NonNegativeInt
    """Global rank that it befalls."""
    step: NonNegativeInt | None = None
    """Step in which it happens, None for every one; a simulated step is the one that it happens in. Injected faults
    happen once, with None in the first step, but for a slow rank."""
    phase: str | None = None
    """Phase as in Trace.phases (forward, backward, optimizer), of injected faults one of PHASES; None is the whole
    step, or its start."""
    argument: NonNegativeFloat = 0.0
    """How many times slower. Simulated, also the record (crash, hang) or the message sent (drop-message), from 0 in its
    phase. Injected while a checkpoint is saved or restored: the call on its files, from 1 (crash, no-space, io-error),
    or the seconds that each takes longer (slow-disk)."""

    @property
    def is_of_disk(self) -> bool:
        """Return whether it happens at a call on the files of a checkpoint, not as a rank enters a phase."""
        return self.kind in DISK_FAULTS or (self.kind == "crash" and self.argument > 0 and self.phase in DISK_PHASES)

    def __str__(self) -> str:
        where = "" if self.phase is None else f" in {self.phase}"
        when = "" if self.step is None else f" of step {self.step}"
        return f"{self.kind} of rank {self.rank}{where}{when}"


Faults = tuple[Fault, ...]


def injection_problems(faults: Iterable[Fault], num_ranks: int, num_steps: int) -> list[str]:
    """Return why faults cannot be injected into a run of so many ranks and steps, one message each."""
    return [
        f"{fault_name(number, fault.kind)}: {problem}"
        for number, fault in enumerate(faults)
        for problem in _problems(fault, num_ranks, num_steps)
    ]


def fault_name(position: int, kind: str | None) -> str:
    """Return what a message calls the fault at `position` in a list, from 0: its number from 1, and its kind."""
    return f"fault {position + 1}" if kind is None else f"fault {position + 1} ({kind})"


def _problems(fault: Fault, num_ranks: int, num_steps: int) -> list[str]:
    problems = []
    if fault.kind not in INJECTED:
        problems.append(f'kind = "{fault.kind}" is simulated only: inject one of {", ".join(INJECTED)}')
    if fault.rank >= num_ranks:
        problems.append(f"rank = {fault.rank}, and there are {num_ranks}: use one from 0 to {num_ranks - 1}")
    if fault.step is not None and not 1 <= fault.step <= num_steps:
        problems.append(f"step = {fault.step}, and the run has {num_steps}: use one from 1 to {num_steps}")
    if fault.phase is not None and fault.phase not in PHASES:
        problems.append(f'phase = "{fault.phase}": must be one of {", ".join(PHASES)}')
    if fault.kind in ("flip-gradient", "nan-gradient", "loss-spike") and fault.phase is not None:
        problems.append(f'phase = "{fault.phase}" of a {fault.kind}: leave it out, it has only one')
    if fault.kind == "loss-spike" and fault.argument <= 1:
        problems.append(f"argument = {fault.argument:g} of a loss-spike: say by how much, such as 100")
    if fault.kind == "slow-rank" and fault.argument <= 1:
        problems.append(f"argument = {fault.argument:g} of a slow-rank: say how many times slower, such as 3")
    return problems
