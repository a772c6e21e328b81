"""Equal blocks share one graph, however many they are, and no step after the second compiles anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.utils import counters

from compiler_warnings import COMPILER_WARNINGS
from meshwright.parallelism.torch_private.torch_compile_count import compile_count
from meshwright.spec.job.job import Job
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import TINY_MODEL, tiny_job

pytestmark = COMPILER_WARNINGS

_NUM_STEPS = 4
_SECTIONS: dict[str, dict[str, Any]] = {
    "8 blocks, sharded": {
        "model": {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 8}},
        "layout": {"dp_shard": 2},
    },
}
_LONG: dict[str, dict[str, Any]] = {
    "documents, several microbatches": {"layout": {"dp_shard": 2}, "data": {"mask_documents": True}},
    "32 blocks, sharded": {
        "model": {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 32}},
        "layout": {"dp_shard": 2},
    },
    "tensor parallel, recomputed": {"layout": {"tp": 2, "activation_checkpoint": "selective"}},
    "context parallel": {"layout": {"cp": 2}},
    "pipeline": {
        "model": {**TINY_MODEL, "options": {**TINY_MODEL["options"], "num_layers": 6}},
        "layout": {"pp": 2, "schedule": "Interleaved1F1B"},
    },
    "replicated": {"layout": {"dp_replicate": 2}},
    "the model as one graph": {"layout": {"dp_shard": 2, "compile": "model"}},
}


@pytest.mark.parametrize("sections", [_SECTIONS, pytest.param(_LONG, marks=pytest.mark.long)], ids=["usual", "more"])
def test_nothing_is_compiled_after_the_second_step(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    jobs = [_job(tmp_path, one) for one in sections.values()]
    found = run_ranks(graphs_of_steps, 2, jobs)[0]
    for name, (steps, validations) in zip(sections, found, strict=True):
        assert steps[0] == 1, f"{name}: its blocks are equal"
        assert set(steps[1:]) == {0}, f"{name}: {steps}"
        # A forward that keeps nothing for a backward is another graph.
        assert validations == [1, 0], name


def graphs_of_steps(jobs: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Return for each job the graphs that each step compiled on this rank, and each of two validations in between."""
    return [_graphs_of_steps(Job.from_dict(job)) for job in jobs]


def _graphs_of_steps(job: Job) -> tuple[list[int], list[int]]:
    torch._dynamo.reset()
    counters.clear()
    training = Training.build(job, Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    totals, validations = [0], []
    for step in range(1, _NUM_STEPS + 1):
        before = compile_count().num_graphs
        training.step(step, training.loader.microbatches(step - 1))
        totals.append(compile_count().num_graphs - before)
        if step % 2 == 0:
            before = compile_count().num_graphs
            training.step.validate([training.loader.validation_microbatches(0)])
            validations.append(compile_count().num_graphs - before)
    training.loader.close()
    return totals[1:], validations


def _job(folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
    layout = {"microbatch_size": 1, "compile": True, "compile_backend": "aot_eager", **sections["layout"]}
    data = {"validation_fraction": 0.1, **sections.get("data", {})}
    train = {"steps": _NUM_STEPS, "global_batch_size": 4, "validation_interval": 2, "validation_batches": 1}
    return tiny_job(folder, **{**sections, "layout": layout, "data": data, "train": train})
