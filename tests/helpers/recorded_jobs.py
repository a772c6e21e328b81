"""Jobs of two steps that the prover records: all of their numbers, compared with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.prover.differences import TOLERANCES, assemble, compare
from meshwright.prover.record import Record, record
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks


def sums_job(
    folder: Path, layout: Layout, sizes: dict[str, Any], *, is_masked: bool = True, precision: str = "float64"
) -> Job:
    """Return a job on short documents about sums; `sizes` are options of the model besides the smallest ones."""
    corpus = folder / "sums.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(3000)))
    smallest = {"vocab_size": 264, "dim": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return Job.from_dict(
        {
            "model": {"source": "llama-1m", "options": {**smallest, "ffn_dim": 24, **sizes}},
            "data": {"source": str(corpus), "mask_documents": is_masked, "cache_dir": str(folder / "cache")},
            "train": {"steps": 2, "seq_len": 32, "global_batch_size": 8},
            # As the prover has it: a usual eps makes of rounding in a gradient of zero a step like any other.
            "optimizer": {"eps": 1e-2, "learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.5},
            "precision": {"compute": precision},
            "layout": layout.to_dict(),
        }
    )


def record_all(jobs: list[Job]) -> list[Record]:
    return [record(job, "cpu", None, False)[0] for job in jobs]


def require_as_one_process(jobs: Sequence[Job], alone: Sequence[Job], num_ranks: int) -> None:
    """Compare each of `jobs` on `num_ranks` ranks with one of `alone` on one, which take turns."""
    [of_one] = run_ranks(record_all, 1, list(alone))
    of_ranks = run_ranks(record_all, num_ranks, list(jobs))
    for number, job in enumerate(jobs):
        whole = assemble([records[number] for records in of_ranks])
        assert whole.unequal_copies == [], job
        one = assemble([of_one[number % len(alone)]])
        differences = compare(whole, one, TOLERANCES[job.precision.compute])
        assert all(found.relative <= found.bar for found in differences), (job, differences)
