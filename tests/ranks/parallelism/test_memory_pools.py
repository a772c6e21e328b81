"""Tensors that are moved into a pool train to the same bits, under layouts that shard them in every way.

The pool of a CPU is the CPU's memory: what is tested is that FSDP2, optimizers and checkpoints use what was moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.memory.managed_pool import ManagedPool
from meshwright.memory.memory_pools import MemoryPools
from meshwright.prover.differences import Record
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.layout.layout_text import parse_layout
from run_ranks import run_ranks
from training_runs import FinishedRun, tiny_job, train_on_this_rank

pytestmark = DYNAMO_WARNINGS

SECTION = MemorySection(embedding="uvm", optimizer_state="uvm")
# 263 rows are no multiple of any degree here.
TIED = {"source": "llama-1m", "options": {"vocab_size": 263, "num_layers": 2, "tie_embeddings": True}}
UNEVEN = {"source": "llama-1m", "options": {"vocab_size": 263, "num_layers": 2}}
EVEN = {"source": "llama-1m", "options": {"vocab_size": 264, "num_layers": 2}}


def _pools(section: MemorySection, device: torch.device) -> MemoryPools:
    made = [ManagedPool(device) for _ in range(2)]
    return MemoryPools(section, device, embedding=made[0], optimizer_state=made[1])


def _records(jobs: list[dict[str, Any]], *, moves: bool) -> list[tuple[Record, int]]:
    """Return what each job computes, and the bytes that were moved."""
    found, made = [], list[MemoryPools]()

    def pools(section: MemorySection, device: torch.device) -> MemoryPools:
        made.append(_pools(section, device) if moves else MemoryPools(section, device))
        return made[-1]

    for given in jobs:
        with patch("meshwright.trainer.step.build_pipeline.memory_pools", pools):
            result = record(Job.from_dict(given), "cpu", None, False)[0]
        used = [pool for pool in (made[-1].embedding, made[-1].optimizer_state) if pool is not None]
        found.append((result, min((pool.num_bytes for pool in used), default=0)))
    return found


def _job(folder: Path, layout: str, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    job = tiny_job(folder, train={"steps": 2, "seq_len": 32, "global_batch_size": 8}, optimizer=optimizer)
    return job | {"model": model, "memory": SECTION.to_dict(), "layout": parse_layout(layout).to_dict()}


def _require_equal_bits(num_ranks: int, jobs: list[dict[str, Any]]) -> None:
    for moved, kept in run_ranks(_both, num_ranks, jobs):
        for job, (mine, num_bytes), (plain, none) in zip(jobs, moved, kept, strict=True):
            assert mine.is_equal(plain), job
            assert none == 0
            has_embedding = job["layout"]["pp"] == 1
            assert num_bytes > 0 or not has_embedding, job


def _both(jobs: list[dict[str, Any]]) -> tuple[list[tuple[Record, int]], list[tuple[Record, int]]]:
    return _records(jobs, moves=True), _records(jobs, moves=False)


def test_shards_with_padding(tmp_path: Path) -> None:
    _require_equal_bits(2, [_job(tmp_path, "dp_shard=2", UNEVEN, {})])


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (
            1,
            [("microbatch_size=2", TIED, {}), ("microbatch_size=2", TIED, {"name": "muon", "state_dtype": "bfloat16"})],
        ),
        (2, [("tp=2", EVEN, {"name": "muon"}), ("pp=2", TIED, {}), ("dp_shard=2", TIED, {"state_dtype": "bfloat16"})]),
        (2, [("dp_shard=2,compile=model,compile_backend=aot_eager,gradient_sync=microbatch", UNEVEN, {})]),
        (4, [("tp=2,dp_shard=2", EVEN, {}), ("dp_replicate=2,dp_shard=2", UNEVEN, {}), ("pp=2,dp_shard=2", TIED, {})]),
    ],
)
def test_further_layouts(tmp_path: Path, num_ranks: int, cases: list[Any]) -> None:
    _require_equal_bits(num_ranks, [_job(tmp_path, *case) for case in cases])


def test_a_cpu_trains_as_without_and_says_so(tmp_path: Path) -> None:
    plain, named = (
        tiny_job(tmp_path, memory=memory, train={"steps": 3}, layout={"dp_shard": 1})
        for memory in ({}, {**SECTION.to_dict(), "communication": "nccl"})
    )
    runs = [FinishedRun(tmp_path / name, _train(job, tmp_path / name)) for name, job in (("a", plain), ("b", named))]
    assert runs[0].parameter_hash == runs[1].parameter_hash
    assert runs[0].losses == runs[1].losses


def _train(job: dict[str, Any], folder: Path) -> list[int]:
    return run_ranks(train_on_this_rank, 1, job, str(folder), False)


def _train_with_pools(job: dict[str, Any], folder: str, resume: bool) -> int:
    with patch("meshwright.trainer.step.build_pipeline.memory_pools", _pools):
        return train_on_this_rank(job, folder, resume)


@pytest.mark.long
def test_a_resumed_run_loads_into_what_was_moved(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, memory=SECTION.to_dict(), layout={"dp_shard": 2}, train={"steps": 6})
    plain = FinishedRun(tmp_path / "plain", run_ranks(train_on_this_rank, 2, job, str(tmp_path / "plain"), False))
    stopped = {**job, "train": {**job["train"], "stop_after": 3}}
    folder = str(tmp_path / "other")
    run_ranks(_train_with_pools, 2, stopped, folder, False)
    resumed = FinishedRun(tmp_path / "other", run_ranks(_train_with_pools, 2, job, folder, True))
    assert resumed.parameter_hash == plain.parameter_hash
