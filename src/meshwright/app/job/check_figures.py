"""The numbers of a checked job, as `meshwright check --json` and `Checked.figures` have them."""

from dataclasses import dataclass
from typing import Any

from meshwright.app.job.summary import checkpoint_bytes, concrete_layout
from meshwright.planner.explain.verdict import Verdict
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.adapted_model import adapted_model
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec


@dataclass(frozen=True)
class CheckFigures:
    """What the lines of a check say in words; None where it is not known before training."""

    num_ranks: int | None
    layout: dict[str, Any] | None
    """Every key of the layout; what it leaves open as it is priced, where it is."""
    num_parameters: int | None
    flops_per_token: float | None
    """Forward and backward."""
    checkpoint_bytes: int | None
    """Of one checkpoint."""
    num_steps: int
    global_batch_size: int
    """Sequences, or samples, of a step."""
    global_batch_tokens: int | None
    """Tokens of a step; None for samples that are not text."""
    num_microbatches: int | None
    """Of each data-parallel rank in a step."""
    step_s: float | None
    """Predicted on the job's cluster, as are the following."""
    step_relative_error: float | None
    """Half width of the 80 % interval of step_s, relative."""
    mfu: float | None
    reserved_bytes: float | None
    """What the allocator of the fullest rank reserves of its device, cached blocks included."""
    usable_bytes: float | None
    """What a rank can reserve of it."""
    fullest_pipeline_rank: int | None
    host_bytes: float | None
    """What a rank keeps in the host's memory; None where that is nothing, as is the following."""
    usable_host_bytes: float | None
    """A rank's share of the host's memory."""
    reference_scoring_s: float | None = None
    """In which the reference of a dpo job scores all pairs, before the first step; None where that is not priced."""


def check_figures(job: Job, num_ranks: int | None, verdict: Verdict | None) -> CheckFigures:
    """Return the numbers of a valid job; `verdict` is what is predicted of it, None where nothing is."""
    layout, architecture = concrete_layout(job, num_ranks), resolve_architecture(job.model)
    priced = layout if verdict is None else verdict.candidate.layout
    spec = None if architecture is None else model_spec(architecture)
    is_text = not is_object_source(job.data.source)
    estimate = None if verdict is None else verdict.candidate.estimate
    host = None if verdict is None else verdict.host
    return CheckFigures(
        num_ranks=None if layout is None else layout.num_ranks,
        layout=None if priced is None else priced.to_dict(),
        num_parameters=None if spec is None else spec.num_parameters,
        flops_per_token=None if spec is None else adapted_model(spec, job.adapter).flops_per_token(job.train.seq_len),
        checkpoint_bytes=checkpoint_bytes(job),
        num_steps=job.train.steps,
        global_batch_size=job.global_batch_size,
        global_batch_tokens=job.workload.global_batch_tokens if is_text else None,
        num_microbatches=None if layout is None else job.num_microbatches(layout),
        step_s=None if estimate is None else estimate.step.total_s,
        step_relative_error=None if estimate is None else estimate.relative_error,
        mfu=None if estimate is None else estimate.mfu,
        reserved_bytes=None if verdict is None else verdict.reserved_bytes,
        usable_bytes=None if verdict is None else verdict.usable_bytes,
        fullest_pipeline_rank=None if verdict is None else verdict.fullest_rank,
        host_bytes=None if host is None else host.needed_bytes,
        usable_host_bytes=None if host is None else host.usable_bytes,
    )
