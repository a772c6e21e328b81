"""The trainer's step without a data pipeline, for the tracer."""

import sys
from collections.abc import Callable, Sequence

import torch

from meshwright.data.examine.sample_limits import sample_limits
from meshwright.data.loader import Microbatch, positions_in, stack
from meshwright.data.user_data import first_sample
from meshwright.models.attention.attention_choice import state_document_length
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.build_pipeline import build_pipeline, build_train_step


def build_step(device: torch.device, rank: int, world_size: int, job: str, folder: str) -> Callable[[], None]:
    """Return the optimizer step of a job on this rank, with constant tokens; a collective.

    `job` is a resolved Job as JSON, `folder` the folder of modules that it names. The first call runs only two
    microbatches: enough to compile, to accumulate gradients and to reach a steady state.
    """
    return _build(_job(job, folder), Ranks(rank, world_size, device))


def build_part_of_step(
    device: torch.device, rank: int, world_size: int, microbatches: str, job: str, folder: str
) -> Callable[[], None]:
    """Return the same step with a subset of its microbatches, such as 0,1,2,31, in the schedule's order.

    The first call runs one of them.
    """
    chosen = [int(number) for number in microbatches.split(",")]
    return _build(_job(job, folder), Ranks(rank, world_size, device), chosen)


def _job(text: str, folder: str) -> Job:
    """Return the job; code of its own is found in its folder, as `meshwright train` finds it."""
    sys.path.insert(0, folder)
    return Job.from_json(text)


def _build(job: Job, ranks: Ranks, chosen: Sequence[int] | None = None) -> Callable[[], None]:
    # A step is the same whatever its weights are, and fake ranks cannot agree on what a folder holds.
    job = job.replace(model=job.model.replace(initial_weights=None), adapter=job.adapter.replace(initial=None))
    meshes, pipeline, _ = build_pipeline(job, ranks, chosen)
    if job.data.mask_documents:
        state_document_length(pipeline.stages, job.data.document_tokens)
    step = build_train_step(job, meshes, pipeline)
    count = job.num_microbatches(meshes.layout) if chosen is None else len(chosen)
    microbatches = constant_microbatches(job, count, meshes.layout.microbatch_size)
    whole = pipeline.schedule
    first = range(min(2, count)) if chosen is None else [0]
    shorter = iter([whole.of_microbatches(first)])

    def run() -> None:
        pipeline.set_schedule(next(shorter, whole))
        step(1, microbatches[: pipeline.schedule.num_microbatches])

    return run


def constant_microbatches(job: Job, count: int, size: int) -> list[Microbatch]:
    """Return microbatches of token 0, or of the first sample of a user's data object."""
    inputs = targets = torch.zeros(size, job.train.seq_len, dtype=torch.int64)
    if is_object_source(job.data.source):
        sample = first_sample(job.data)
        inputs, targets = (
            stack(size * [value], size * [0], what) for value, what in zip(sample, ("inputs", "targets"), strict=True)
        )
        if (limits := sample_limits(job)) is not None:
            limits.require(inputs, targets, size * [0])
    is_pairs = job.train.task == "dpo"
    documents_BS = inputs if job.data.mask_documents else None
    if is_pairs:
        # One pair in each row, of answers of half its length.
        documents_BS = (torch.arange(job.train.seq_len) >= job.train.seq_len // 2).long().repeat(size, 1)
    positions_BS = None
    if job.data.restarts_positions and documents_BS is not None:
        positions_BS = positions_in(documents_BS)
    pairs_BP = torch.zeros(size, 1, dtype=torch.int64) if is_pairs else None
    return [Microbatch(inputs, targets, index * size, documents_BS, positions_BS, pairs_BP) for index in range(count)]
