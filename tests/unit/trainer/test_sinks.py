"""Metrics survive what ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.spec.job import Job
from meshwright.spec.run import Run
from meshwright.trainer.sinks import open_sinks


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ("", []),
        ('{"step": 1}\n', [1]),
        ('{"step": 1}\n{"step": 2}', [1, 2]),
        ('{"step": 1}\n{"step": 2, "lo', [1]),
        ('{"ste', []),
        ('{"step": 1}\n' * 9000 + '{"step": 2, "lo', [1] * 9000),
    ],
    ids=["empty", "whole", "no newline", "torn", "only torn", "long and torn"],
)
def test_rows_after_a_torn_one_are_whole(tmp_path: Path, left: str, kept: list[int]) -> None:
    run = Run(tmp_path)
    run.metrics.write_text(left)
    [sink] = open_sinks(run, Job())
    sink.write(3, {"step": 3})
    sink.close()
    assert [json.loads(row)["step"] for row in run.metrics.read_text().splitlines()] == [*kept, 3]
