"""ChaosReport: a run with faults next to the same run without, and how each fault was survived."""

from collections import Counter
from collections.abc import Sequence

from meshwright.spec.fault import Fault
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.run.goodput import Goodput
from meshwright.units import first_of


class LedgerEntry(Frozen):
    """A step that one rank has finished or, of an independent replica, gives its part of to the others."""

    step: int
    samples: dict[int, str]
    """Hash of each of its samples, by their slots in the global batch, which know no microbatches and no ranks."""
    time_s: float
    """When this was noted, in seconds since 1970."""
    is_finished: bool = True
    """Whether the rank has finished it; if not, others may have, with its part."""
    epoch: int = 0
    """The quorum that it was done with, of independent replicas: a step that one of them did not survive is done again
    with a newer one."""


Ledger = Sequence[LedgerEntry]


class Injection(Frozen):
    """That a fault has happened."""

    time_s: float
    """In seconds since 1970."""
    step: int
    mark: str
    """The phase, as in a heartbeat, or the call on a file."""
    damaged: str | None = None
    """Name of the checkpoint that was damaged, None for other kinds."""


class FaultOutcome(Frozen):
    """What a fault did to the run."""

    fault: Fault
    injection: Injection | None
    """None where the run never came to it."""
    was_away: bool = False
    """Whether that is because its replica, lost before, was not back for this step, which the others have done."""
    detected_after_s: float | None = None
    """Seconds from the fault until all ranks had ended, or until a check found wrong numbers; None where neither
    happened, as with a slow rank."""
    recovered_after_s: float | None = None
    """Seconds from the fault until the next step was finished by the rank that it befell."""
    others_after_s: float | None = None
    """Seconds from the fault until another replica finished its next step; None where replicas are not independent."""
    lost_steps: int | None = None
    """Finished steps that had to be done again."""
    refused: bool | None = None
    """Whether the damaged checkpoint was set aside; None where none was, or none had to be."""


class ChaosReport(Frozen):
    """What a run with faults ended with, and what it should have."""

    job: Job
    num_ranks: int
    outcomes: tuple[FaultOutcome, ...]
    num_attempts: int
    exit_code: int
    """Of the run with faults."""
    expected_hash: str
    """Of the final parameters of the run without faults."""
    found_hash: str | None
    """The same of the run with faults; None where it did not come to its end."""
    sample_problem: str | None
    """The first step that was made of other samples, that is missing or that counts twice."""
    undisturbed_s: float
    """Seconds of the run without faults."""
    disturbed_s: float
    """Seconds of the run with faults."""
    goodput: Goodput | None = None
    """Where the time of the run with faults went."""
    num_repairs: int = 0
    """How often an error of the disk ended the run (exit code 70), and it was resumed as after a repair."""
    smallest: tuple[Fault, ...] | None = None
    """Fewest of the faults that make it fail; None where it does not, or was not asked for."""

    @property
    def problems(self) -> list[str]:
        """Return what is wrong with the run, one sentence each; empty if it survived."""
        found = []
        if self.exit_code:
            found.append(f"the run ended with exit code {self.exit_code}")
        elif self.found_hash != self.expected_hash:
            found.append("the final parameters are not those of the run without faults")
            if self.job.replicas.independent and not self.job.train.exact_elastic:
                found.append(
                    "independent replicas add sums up in another order while one is away, so that parameters differ by "
                    "rounding: train.exact_elastic = true rules that out"
                )
        if self.sample_problem is not None:
            found.append(self.sample_problem)
        for one in self.outcomes:
            if one.refused is False and one.injection is not None:
                found.append(f"{one.injection.damaged} was damaged ({one.fault}) and not refused")
        missed = [one.fault for one in self.outcomes if one.injection is None and not one.was_away]
        if missed and not self.exit_code:
            found.append(f"the run never came to: {'; '.join(map(str, missed))}")
        return found

    @property
    def holds(self) -> bool:
        """Return whether the run ended as if nothing had happened."""
        return not self.problems


def lineage(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Return the steps that count of one rank's ledger: of those before a restart, the ones that it restored."""
    kept: list[LedgerEntry] = []
    for entry in entries:
        while kept and kept[-1].step >= entry.step:
            kept.pop()
        kept.append(entry)
    return kept


def sample_problem(expected: Sequence[Ledger], found: Sequence[Ledger]) -> str | None:
    """Return the first difference between what the steps of two runs are made of, in a sentence.

    Each is given as the ledgers of its ranks. Which rank took which samples may differ, as it does where the ranks
    change, and how many took them may not: each is used as often as in the run without faults.
    """
    wanted, used = samples_by_step(expected), samples_by_step(found)
    for step in sorted(wanted.keys() | used.keys()):
        if step not in used:
            return f"step {step} is missing from the ledger"
        if step not in wanted:
            return f"step {step} was done, and there is none"
        lost, added = wanted[step] - used[step], used[step] - wanted[step]
        if lost and {slot for slot, _ in lost} == {slot for slot, _ in added}:
            return f"step {step} read other samples, or the same ones with other values, at {_slots(lost)}"
        if lost:
            return f"step {step} was made without the samples of {_slots(lost)}"
        if added:
            return f"step {step} was also made of other samples, or of the same ones twice, at {_slots(added)}"
    return None


def samples_by_step(ledgers: Sequence[Ledger]) -> dict[int, Counter[tuple[int, str]]]:
    """Return how many ranks used the samples of which slot, with their hash, in each step that counts."""
    counting = [entry for ledger in ledgers for entry in lineage(ledger)]
    newest = dict[int, int]()
    for entry in counting:
        newest[entry.step] = max(entry.epoch, newest.get(entry.step, 0))
    steps = dict[int, Counter[tuple[int, str]]]()
    for entry in counting:
        if entry.epoch == newest[entry.step]:
            steps.setdefault(entry.step, Counter()).update(entry.samples.items())
    return steps


def _slots(samples: Counter[tuple[int, str]]) -> str:
    slots = sorted({slot for slot, _ in samples})
    return f"slot{'' if len(slots) == 1 else 's'} {first_of([str(slot) for slot in slots])}"
