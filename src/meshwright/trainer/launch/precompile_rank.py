"""precompile_rank: what each rank of `meshwright precompile` does: one step of the job, and what it compiled saved."""

import sys
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.parallelism.torch_private.torch_compile_count import compile_count
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.compile_cache import CacheKey, save_cache
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.build_pipeline import build_pipeline, build_train_step
from meshwright.trainer.step.build_step import constant_microbatches


class Precompiled(NamedTuple):
    """What one rank compiled."""

    num_graphs: int
    wall_s: float
    saved: str
    """One line about what all ranks saved."""


def precompile_rank(job_text: str, module_dir: str, folder: str, num_threads: int) -> Precompiled:
    """Compile what a training step of the job compiles on this rank, and save it to `folder`; a collective.

    Validation's forward is compiled too, where the job validates.
    """
    # As `meshwright train` has them: Inductor's code for a processor depends on it.
    torch.set_num_threads(num_threads)
    silence_known_warnings()
    # Code of the job's own is found in its folder.
    sys.path.insert(0, module_dir)
    job = Job.from_json(job_text)
    ranks = Ranks.joined(job.run)
    _run(job, ranks)
    count = compile_count()
    return Precompiled(count.num_graphs, count.wall_s, save_cache(Path(folder), CacheKey.of(job, ranks), ranks))


def _run(job: Job, ranks: Ranks) -> None:
    """Run a step of two microbatches at most, and validate on them if the job does; a collective."""
    meshes, pipeline, _ = build_pipeline(job, ranks)
    step = build_train_step(job, meshes, pipeline)
    count = min(2, job.num_microbatches(meshes.layout))
    pipeline.set_schedule(pipeline.schedule.of_microbatches(range(count)))
    microbatches = constant_microbatches(job, count, meshes.layout.microbatch_size)
    step(1, microbatches)
    if job.train.validation_interval:
        step.validate([microbatches])
