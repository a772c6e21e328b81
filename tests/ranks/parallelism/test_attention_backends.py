"""Layouts whose attention another backend computes train as one process does under `auto`, with masks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.prover.differences import TOLERANCES, assemble, compare
from meshwright.prover.record import Record, record
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from run_ranks import run_ranks

pytestmark = DYNAMO_WARNINGS

MASKED: dict[str, list[str]] = {
    "two ranks": [
        "tp=2,attention_backend=flex",
        "cp=2,cp_method=ulysses,attention_backend=flex",
        "pp=2,attention_backend=math",
    ],
    "one": ["attention_backend=flex", "attention_backend=math,activation_checkpoint=selective"],
    "more of two": [
        "pp=2,attention_backend=flex,activation_checkpoint=full",
        "dp_shard=2,attention_backend=flex,compile=true,compile_backend=aot_eager",
        "dp_shard=2,attention_backend=math,compile=true,compile_backend=aot_eager",
        "cp=2,cp_method=ulysses,attention_backend=math",
    ],
    "four": [
        "tp=2,cp=2,cp_method=ulysses,attention_backend=flex",
        "pp=2,tp=2,schedule=Interleaved1F1B,attention_backend=flex",
        "pp=2,dp_shard=2,schedule=ZBVZeroBubble,attention_backend=math",
    ],
}
"""Layouts of a model with documents and a window, by a name for their ranks."""
PLAIN = ["tp=2,attention_backend=flash", "cp=2,cp_method=ulysses,attention_backend=flash"]
"""Those of one without, since flash attention takes no mask."""


def _job(folder: Path, layout: Layout, *, is_masked: bool) -> Job:
    corpus = folder / "sums.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(3000)))
    sizes: dict[str, Any] = {"vocab_size": 264, "dim": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 4, "ffn_dim": 24} | ({"sliding_window": 9} if is_masked else {})
    return Job.from_dict(
        {
            "model": {"source": "llama-1m", "options": sizes},
            "data": {"source": str(corpus), "mask_documents": is_masked, "cache_dir": str(folder / "cache")},
            "train": {"steps": 2, "seq_len": 32, "global_batch_size": 8},
            # As the prover has it: a usual eps makes of rounding in a gradient of zero a step like any other.
            "optimizer": {"eps": 1e-2, "learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.5},
            "precision": {"compute": "float64"},
            "layout": layout.to_dict(),
        }
    )


def _records(jobs: list[Job]) -> list[Record]:
    return [record(job, "cpu", None, False)[0] for job in jobs]


def _require_equal(folder: Path, texts: list[str], *, is_masked: bool) -> None:
    layouts = [parse_layout(text) for text in texts]
    [[alone]] = run_ranks(_records, 1, [_job(folder, Layout(), is_masked=is_masked)])
    jobs = [_job(folder, layout, is_masked=is_masked) for layout in layouts]
    of_ranks = run_ranks(_records, layouts[0].num_ranks, jobs)
    for number, job in enumerate(jobs):
        whole = assemble([records[number] for records in of_ranks])
        assert whole.unequal_copies == []
        differences = compare(whole, assemble([alone]), TOLERANCES["float64"])
        assert all(one.relative <= one.bar for one in differences), (job.layout, differences)


@pytest.mark.parametrize(
    "ranks", [pytest.param(name, marks=() if name == "two ranks" else pytest.mark.long) for name in MASKED]
)
def test_backends_under_masks_train_as_auto_does(tmp_path: Path, ranks: str) -> None:
    _require_equal(tmp_path, MASKED[ranks], is_masked=True)


@pytest.mark.long
def test_flash_trains_as_auto_does(tmp_path: Path) -> None:
    _require_equal(tmp_path, PLAIN, is_masked=False)
