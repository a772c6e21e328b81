"""phase_problems(): why faults cannot be injected into a phase that only some steps of a job have; needs no torch."""

from collections.abc import Sequence

from meshwright.spec.fault import Fault, fault_name
from meshwright.spec.job.job import Job
from meshwright.spec.storage_fault import DAMAGES


def phase_problems(faults: Sequence[Fault], job: Job) -> list[str]:
    """Return why faults cannot be injected into validations of this job's run, one message each.

    Any step may have a checkpoint, since a run that is asked to stop saves one.
    """
    steps = _validated_steps(job)
    return [
        f"{fault_name(number, fault.kind)}: {problem}"
        for number, fault in enumerate(faults)
        if fault.phase == "validation" and (problem := _problem(fault, steps, job.train.validation_interval))
    ]


def _validated_steps(job: Job) -> list[int]:
    """Return the steps after which the run measures the validation loss, or answers questions."""
    train, questions = job.train, job.evaluation
    intervals = [train.validation_interval, questions.interval if questions.source else 0]
    found = {step for interval in intervals if interval for step in range(interval, train.steps + 1, interval)}
    return sorted({*found, train.steps} if questions.source else found)


def _problem(fault: Fault, validated: Sequence[int], interval: int) -> str | None:
    """Return why a fault in validation cannot be injected, None where it can."""
    if not validated:
        return (
            f'phase = "validation", and with train.validation_interval = {interval} no step has one: set it to a '
            "number of steps that the run has, or choose another phase"
        )
    asked = fault.step
    if asked is None or asked in validated:
        return None
    if fault.kind in DAMAGES and asked < validated[-1]:
        # A checkpoint is damaged in the first such phase from that step on.
        return None
    near = min(validated, key=lambda step: abs(step - asked))
    return (
        f'phase = "validation" of step {asked}, which has none, with train.validation_interval = {interval}: use '
        f"a step that has one, such as {near}, or choose another phase"
    )
