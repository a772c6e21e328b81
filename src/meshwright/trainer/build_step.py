"""build_step: the trainer's own step for whoever wants to run it without data, such as the tracer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.config.load import load_job
from meshwright.data.loader import Microbatch
from meshwright.spec.job import Job
from meshwright.trainer.optimizer import build_optimizer
from meshwright.trainer.ranks import Ranks
from meshwright.trainer.train_step import TrainStep
from meshwright.trainer.training import build_pipeline


def build_step(device: torch.device, rank: int, world_size: int, job_file: str, *overrides: str) -> Callable[[], None]:
    """Return the optimizer step of a job on this rank, over tokens that are all the same; a collective."""
    job = load_job(job_file, overrides).job
    meshes, pipeline, _ = build_pipeline(job, Ranks(rank, world_size, device))
    step = TrainStep(job, pipeline.stages, meshes, build_optimizer(pipeline.stages, job.optimizer), pipeline)
    microbatches = _microbatches(job, job.num_microbatches(meshes.layout), meshes.layout.microbatch_size)

    def run() -> None:
        step(1, microbatches)

    return run


def _microbatches(job: Job, count: int, size: int) -> list[Microbatch]:
    tokens_BS = torch.zeros(size, job.train.seq_len, dtype=torch.int64)
    documents_BS = tokens_BS if job.data.mask_documents else None
    return [Microbatch(tokens_BS, tokens_BS, index * size, documents_BS) for index in range(count)]
