"""What a CUDA graph captures, run without one, trains to the bits of FSDP2: its sharding and its gradient buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compiler_warnings import COMPILER_WARNINGS
from meshwright.checkpoint.parameter_hash import parameter_hash
from meshwright.parallelism import apply
from meshwright.parallelism.pipeline import pipeline
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job

_BLOCKS = {"compile": True, "compile_backend": "aot_eager"}
Found = tuple[list[float], list[float], float, str]
"""Losses, gradient norms, the loss of a validation, the hash of the parameters."""


@COMPILER_WARNINGS
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{}, pytest.param(_BLOCKS, marks=pytest.mark.long)], ids=["eager", "compiled"])
def test_the_captured_step_trains_to_the_same_bits(tmp_path: Path, compute: str, layout: dict[str, Any]) -> None:
    sections = {"precision": {"compute": compute}, "data": {"validation_fraction": 0.1}}
    job = tiny_job(tmp_path, layout={**layout, "cuda_graphs": True}, **sections)
    [plain], [captured] = (run_ranks(steps, 1, job, on_cpu) for on_cpu in (False, True))
    assert captured == plain


def steps(job: dict[str, Any], on_cpu: bool) -> Found:
    """Return what five steps and a validation come to, with the sharding for CUDA graphs where `on_cpu` asks for it."""
    where = (mock.patch.object(module, "shards_for_graphs", return_value=on_cpu) for module in (apply, pipeline))
    with next(where), next(where):
        training = Training.build(Job.from_dict(job), Ranks(0, 1, torch.device("cpu")))
    results = [training.step(step, training.loader.microbatches(step - 1)) for step in range(1, 6)]
    validation = training.step.validate([training.loader.validation_microbatches(0)])
    training.loader.close()
    digest = parameter_hash(canonical_parameters(training.model))
    return [one.loss for one in results], [one.grad_norm for one in results], validation, digest
