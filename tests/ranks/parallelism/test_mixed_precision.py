"""bfloat16 is what matmuls compute in: weights, moments and sums of gradients over ranks stay float32."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.checkpoint.checkpoint import saved_tensors
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job, train_on_ranks

BFLOAT16 = {"precision": {"compute": "bfloat16", "reduce": "float32"}}
LAYOUTS = [Layout(dp_shard=2), Layout(dp_replicate=2), Layout(dp_shard=2, pp=2), Layout(dp_replicate=2, dp_shard=2)]


def test_a_checkpoint_holds_float32_only(tmp_path: Path) -> None:
    finished = train_on_ranks(tiny_job(tmp_path, **BFLOAT16), tmp_path / "run", 2)
    checkpoint = finished.run.checkpoint(finished.run.checkpoint_steps()[-1])
    stored = saved_tensors(checkpoint)
    assert len(stored) > 30
    assert {part.dtype for parts in stored.values() for part in parts} == {"float32"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_summed_over_ranks_in_float32(layout: Layout, tmp_path: Path) -> None:
    degrees = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard")}
    job = tiny_job(tmp_path, **BFLOAT16, layout=degrees)
    for dtypes in run_ranks(_summed_dtypes, layout.num_ranks, job):
        assert dtypes == {"torch.float32"}


def _summed_dtypes(job: dict[str, Any]) -> set[str]:
    training = Training.build(Job.from_dict(job), Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    with _LargeSums() as sums:
        training.step(1, training.loader.microbatches(0))
    training.loader.close()
    return sums.dtypes


class _LargeSums(TorchDispatchMode):
    """The dtypes of tensors of more than a hundred elements that ranks add up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("reduce_scatter", "allreduce")):
            leaves: Iterable[Any] = tree_leaves((args, kwargs))
            self.dtypes |= {str(one.dtype) for one in leaves if isinstance(one, Tensor) and one.numel() > 100}
        return func(*args, **(kwargs or {}))
