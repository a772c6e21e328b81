"""The save after SIGTERM: in the foreground, and only where the grace period allows what a save took before."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import torch
from torch import distributed as dist

from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.run.run_checkpoints import RunCheckpoints
from meshwright.trainer.step.training import Training
from run_ranks import run_ranks
from training_runs import tiny_job

LATE_RANK = 1


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def save_late_and_in_time(folder: Path) -> tuple[list[int], list[str]]:
    """Save in the background, then with no time on one rank, then with time; return steps and log lines."""
    rank = dist.get_rank()
    job = Job.from_dict(tiny_job(folder, checkpoint={"mode": "async", "keep": 9}))
    training = Training.build(job, Ranks(rank, dist.get_world_size(), torch.device("cpu")))
    lines = Lines()
    logger.addHandler(lines)
    run = Run(folder / "run")
    run.folder.mkdir(exist_ok=True)
    with RunCheckpoints(training, run, 0) as checkpoints:
        checkpoints.save(1)
        now_s = time.monotonic()
        checkpoints.save_before_kill(2, None, now_s if rank == LATE_RANK else math.inf)
        checkpoints.save_before_kill(3, None, now_s + 1000 if rank == LATE_RANK else math.inf)
        # There is nothing else to do after the last step.
        checkpoints.save_before_kill(job.train.steps, None, now_s)
    return run.checkpoint_steps(), [text for text in lines.texts if "no checkpoint" in text]


def test_a_save_that_would_be_killed_is_not_begun(tmp_path: Path) -> None:
    tiny_job(tmp_path)
    for steps, lines in run_ranks(save_late_and_in_time, 2, tmp_path):
        assert steps == [1, 3, 6]
        [line] = lines
        assert "after step 2: run.grace_s = 120 leaves 0" in line
        assert line.endswith("the newest is step-1")
