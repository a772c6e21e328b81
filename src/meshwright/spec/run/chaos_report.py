"""ChaosReport: a run with faults next to the same run without, and how each fault was survived."""

from collections.abc import Sequence

from meshwright.spec.fault import Fault
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.run.goodput import Goodput


class LedgerEntry(Frozen):
    """A step that one rank has finished."""

    step: int
    samples: str
    """Hash of the samples that it used, in their order."""
    time_s: float
    """When it was finished, in seconds since 1970."""


class Injection(Frozen):
    """That a fault has happened."""

    time_s: float
    """In seconds since 1970."""
    step: int
    mark: str
    """The phase, as in a heartbeat."""


class FaultOutcome(Frozen):
    """What a fault did to the run."""

    fault: Fault
    injection: Injection | None
    """None where the run never came to it."""
    detected_after_s: float | None = None
    """Seconds from the fault until all ranks had ended, or until a check found wrong numbers; None where neither
    happened, as with a slow rank."""
    recovered_after_s: float | None = None
    """Seconds from the fault until the next step was finished by the rank that it befell."""
    lost_steps: int | None = None
    """Finished steps that had to be done again."""


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
        if self.sample_problem is not None:
            found.append(self.sample_problem)
        missed = [one.fault for one in self.outcomes if one.injection is None]
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


def sample_problem(expected: Sequence[LedgerEntry], found: Sequence[LedgerEntry], rank: int) -> str | None:
    """Return the first difference between what counts of a rank's two ledgers, in a sentence."""
    steps = [entry.step for entry in found]
    for number, entry in enumerate(expected):
        if number >= len(steps) or steps[number] != entry.step:
            return f"rank {rank}: step {entry.step} is missing from its ledger"
        if found[number].samples != entry.samples:
            return f"rank {rank}: step {entry.step} was made of other samples"
    if len(steps) > len(expected):
        return f"rank {rank}: step {steps[len(expected)]} was done, and there is none"
    return None
