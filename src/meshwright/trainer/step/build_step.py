"""The trainer's step without a data pipeline, for the tracer."""

import sys
from collections.abc import Callable, Sequence

import torch

from meshwright.data.loader import Microbatch, positions_in, stack
from meshwright.data.user_data import load_user_data, read_pair
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
        sample = read_pair(load_user_data(job.data), 0, job.data.source)
        inputs, targets = (
            stack(size * [value], size * [0], what) for value, what in zip(sample, ("inputs", "targets"), strict=True)
        )
    documents_BS = inputs if job.data.mask_documents else None
    positions_BS = positions_in(inputs) if job.data.restarts_positions else None
    return [Microbatch(inputs, targets, index * size, documents_BS, positions_BS) for index in range(count)]
