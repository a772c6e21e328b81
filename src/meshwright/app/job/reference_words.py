"""reference_scoring(): what is said of the reference's one forward of all pairs, before the first step of dpo."""

from typing import NamedTuple

from meshwright.data.examine.pair_counts import count_pairs
from meshwright.errors import MeshwrightError
from meshwright.planner.reference_scoring import scoring_s
from meshwright.planner.request import PlanRequest
from meshwright.spec.job.job import Job
from meshwright.spec.run.layout_plan import Candidate
from meshwright.units import counted, format_duration


class ReferenceScoring(NamedTuple):
    """What a job's reference takes, and in words."""

    scoring_s: float | None
    """Seconds; None where the pairs cannot be read."""
    text: str


def reference_scoring(job: Job, request: PlanRequest, candidate: Candidate) -> ReferenceScoring | None:
    """Return what scoring the reference takes in a candidate's layout; None for a job of another task."""
    if job.train.task != "dpo":
        return None
    try:
        found = count_pairs(job.data, request.workload.seq_len)
    except MeshwrightError as error:
        return ReferenceScoring(None, f"scored once before the first step, not priced: {error}")
    seconds = scoring_s(candidate, request, found.num_sequences)
    pairs = f"{counted(found.num_pairs, 'pair')} in {counted(found.num_sequences, 'sequence')}"
    if found.is_start:
        pairs = f"the start of the data, {pairs}"
    return ReferenceScoring(
        seconds, f"scored once before the first step, forward only: about {format_duration(seconds)} for {pairs}"
    )
