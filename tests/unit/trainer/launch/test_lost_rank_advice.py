"""What a rank that lost another advises: nothing that the launcher does by itself."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from meshwright.spec.job.job import Job
from meshwright.trainer.launch import explained_error
from training_runs import tiny_job


@pytest.mark.parametrize(
    ("max_restarts", "is_forked", "says"),
    [
        (5, True, "the launcher starts all ranks again unless run.max_restarts = 5 is used up"),
        (0, True, "start again with --resume"),
        (5, False, "start again with --resume"),
    ],
)
def test_who_starts_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int, is_forked: bool, says: str
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_forked else None)
    job = Job.from_dict(tiny_job(tmp_path, run={"max_restarts": max_restarts}))
    assert explained_error._what_next(job) == says
