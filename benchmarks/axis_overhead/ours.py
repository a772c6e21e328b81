"""Meshwright's own step: what the trainer and the prover build and call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import distributed as dist

from benchmarks.axis_overhead.workload import Step, Workload
from meshwright.data.loader import Microbatch
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training


def build(work: Workload, num_batches: int) -> tuple[Step, list[list[Microbatch]]]:
    """Return the step, and this rank's microbatches of the first `num_batches` steps."""
    training = Training.build(work.job, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    batches = [training.loader.microbatches(step) for step in range(num_batches)]
    # Its thread would prepare a batch that nobody wants while the others are timed.
    training.loader.close()
    numbers = count(1)

    def step(microbatches: Sequence[Microbatch]) -> float:
        return training.step(next(numbers), microbatches).loss

    return step, batches
