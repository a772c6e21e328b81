"""Real training runs for tests: the trainer's own loop on the ranks of run_ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.loop import train
from meshwright.trainer.run.open_run import claim
from run_ranks import run_ranks

TINY_MODEL = {
    "source": "llama-1m",
    "options": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48},
}

SMALL = (
    *("model.options.dim=32", "model.options.head_dim=8", "model.options.ffn_dim=48", "model.options.num_layers=2"),
    *("data.max_bytes=200000", "train.seq_len=32", "train.validation_interval=0"),
)
"""Keys with which examples/tiny.toml takes milliseconds a step."""


def tiny_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a job that takes milliseconds a step; `sections` are merged over its own."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"{n} times {n} is {n * n}; the root of {n * n} is {n}.\n" for n in range(1500)))
    job: dict[str, Any] = {
        "model": TINY_MODEL,
        "data": {"source": str(corpus), "cache_dir": str(folder / "cache")},
        "train": {"steps": 6, "seq_len": 32, "global_batch_size": 8},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3},
        "layout": {"dp_shard": -1, "microbatch_size": 2},
        "checkpoint": {"interval": 3},
        "run": {"device": "cpu"},
    }
    return {name: {**job.get(name, {}), **sections.get(name, {})} for name in job.keys() | sections.keys()}


def train_on_this_rank(job: dict[str, Any], folder: str, resume: bool) -> int:
    """Train inside an existing process group and return the exit code."""
    torch.set_num_threads(1)
    run, parsed = Run(folder), Job.from_dict(job)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if ranks.is_first:
        claim(run, parsed, resume=resume, overwrite=False)
    dist.barrier()
    return int(train(RankConfig(job=parsed, run_dir=folder, module_dir=folder, resume=resume), ranks))


class FinishedRun:
    """What a run left behind."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.run, self.codes = Run(folder), codes
        self.manifest = Manifest.from_json(self.run.manifest.read_text())
        rows = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        self.rows = [row for row in rows if "loss" in row]
        self.validation = [row for row in rows if "validation_loss" in row]

    @property
    def losses(self) -> dict[int, float]:
        """Return the newest loss of each step."""
        return {row["step"]: row["loss"] for row in self.rows}

    @property
    def grad_norms(self) -> dict[int, float]:
        """Return the newest gradient norm of each step."""
        return {row["step"]: row["grad_norm"] for row in self.rows}

    def require_close(self, one: FinishedRun) -> None:
        """Compare losses and gradient norms with those of the same steps on one process."""
        assert self.losses.keys() == one.losses.keys()
        for step, loss in one.losses.items():
            assert self.losses[step] == pytest.approx(loss, rel=2e-6)
            assert self.grad_norms[step] == pytest.approx(one.grad_norms[step], rel=1e-5)

    @property
    def parameter_hash(self) -> str:
        """Return the hash of the final parameters."""
        return str(self.manifest.results["parameter_hash"])


def train_on_ranks(
    job: dict[str, Any], folder: Path, num_ranks: int, *, resume: bool = False, timeout_s: float = 300
) -> FinishedRun:
    """Train `job` into `folder` on `num_ranks` gloo ranks."""
    codes = run_ranks(train_on_this_rank, num_ranks, job, str(folder), resume, timeout_s=timeout_s)
    return FinishedRun(folder, codes)


def train_all(jobs: list[dict[str, Any]], folders: list[str]) -> list[int]:
    """Train one job after another in one process group and return the exit codes."""
    return [train_on_this_rank(job, folder, False) for job, folder in zip(jobs, folders, strict=True)]


def train_all_on_ranks(
    folder: Path,
    num_ranks: int,
    cases: list[dict[str, dict[str, Any]]],
    on_rank: Callable[[list[dict[str, Any]], list[str]], list[int]] = train_all,
) -> list[FinishedRun]:
    """Train tiny jobs of three steps with the sections of `cases`, all in one process group, by `on_rank`."""
    short = {"train": {"steps": 3, "global_batch_size": 4}, "checkpoint": {"interval": 0}}
    jobs = [tiny_job(folder, **(short | sections)) for sections in cases]
    folders = [folder / f"{num_ranks}-{index}" for index in range(len(cases))]
    for codes in run_ranks(on_rank, num_ranks, jobs, list(map(str, folders))):
        assert codes == [0] * len(cases)
    return [FinishedRun(one, [0]) for one in folders]
