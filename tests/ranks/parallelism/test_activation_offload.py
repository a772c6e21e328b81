"""Activations that wait in the host's memory change no bit of losses and gradients, under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.parallelism.saved_tensors import SavedStorage
from meshwright.prover.differences import Record
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from run_ranks import run_ranks

pytestmark = DYNAMO_WARNINGS

LAYOUTS: dict[str, list[str]] = {
    "two ranks": ["tp=2,activation_checkpoint=selective,microbatch_size=4"],
    "one": [
        "microbatch_size=2",
        "microbatch_size=2,compile=true,compile_backend=aot_eager",
        "microbatch_size=2,activation_checkpoint=selective,compile=true,compile_backend=aot_eager",
    ],
    "more of two": [
        "dp_shard=2,activation_checkpoint=full",
        "cp=2,cp_method=ring,microbatch_size=2",
        "cp=2,cp_method=ulysses,microbatch_size=2,activation_checkpoint=selective,activation_checkpoint_every=2",
        "pp=2",
        "pp=2,schedule=ZBVZeroBubble,microbatch_size=4",
        "pp=2,schedule=InterleavedZeroBubble,activation_checkpoint=selective",
        "pp=2,schedule=ZBVZeroBubble,activation_checkpoint=full",
        "pp=2,schedule=GPipe,activation_checkpoint=full",
        "dp_shard=2,cpu_offload=true",
    ],
    "four": [
        "pp=2,tp=2,schedule=DualPipeV,activation_checkpoint=selective,microbatch_size=2",
        "tp=2,dp_shard=2,compile=true,compile_backend=aot_eager,microbatch_size=2",
        "pp=2,tp=2,schedule=ZBVZeroBubble,compile=true,compile_backend=aot_eager,microbatch_size=2",
    ],
}
EXPERTS = [
    "dp_shard=2,ep=2",
    "dp_shard=2,ep=2,activation_checkpoint=selective",
    "dp_shard=2,ep=2,activation_checkpoint=full,compile=true,compile_backend=aot_eager",
    "tp=2,ep=2,etp=1,microbatch_size=2",
]


def _job(folder: Path, layout: Layout, *, has_experts: bool = False) -> Job:
    corpus = folder / "sums.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(3000)))
    sizes: dict[str, Any] = {"vocab_size": 264, "dim": 64, "num_layers": 4, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
    if has_experts:
        sizes |= {"num_layers": 2, "num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 32}
        del sizes["ffn_dim"]
    return Job.from_dict(
        {
            "model": {"source": "moe-4m" if has_experts else "llama-1m", "options": sizes},
            "data": {"source": str(corpus), "mask_documents": True, "cache_dir": str(folder / "cache")},
            "train": {"steps": 2, "seq_len": 64, "global_batch_size": 16},
            "layout": layout.to_dict(),
        }
    )


def _records(jobs: list[Job]) -> list[tuple[Record, int]]:
    """Return what each job of these computes, and how many storages it moved to the host."""
    found = []
    for job in jobs:
        with patch.object(SavedStorage, "copy_to_host", autospec=True, side_effect=SavedStorage.copy_to_host) as copies:
            found.append((record(job, "cpu", None, False)[0], copies.call_count))
    return found


def _require_equal_bits(jobs: list[Job], num_ranks: int) -> None:
    """Compare each job on each of its ranks with and without offload."""
    offloaded = [job.replace(layout=job.layout.replace(activation_offload=True)) for job in jobs]
    for of_rank in run_ranks(_records, num_ranks, jobs + offloaded):
        for job, (plain, none), (other, moved) in zip(jobs, of_rank, of_rank[len(jobs) :], strict=False):
            assert none == 0
            assert moved > 0, job.layout
            assert plain.is_equal(other), job.layout


@pytest.mark.parametrize(
    "ranks", [pytest.param(name, marks=() if name == "two ranks" else pytest.mark.long) for name in LAYOUTS]
)
def test_offload_changes_no_bit(tmp_path: Path, ranks: str) -> None:
    layouts = [parse_layout(text) for text in LAYOUTS[ranks]]
    _require_equal_bits([_job(tmp_path, layout) for layout in layouts], layouts[0].num_ranks)


@pytest.mark.long
def test_offload_changes_no_bit_of_experts(tmp_path: Path) -> None:
    layouts = [parse_layout(text) for text in EXPERTS]
    _require_equal_bits([_job(tmp_path, layout, has_experts=True) for layout in layouts], 2)
