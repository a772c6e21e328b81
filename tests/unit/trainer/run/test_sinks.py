"""Metrics survive what ends a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.run.sinks import open_sinks


def test_a_resumed_run_continues_its_own_weights_and_biases_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, ids = ModuleType("wandb"), []
    module.init = lambda **options: ids.append(options["id"]) or SimpleNamespace(finish=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("one", "one", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        for sink in open_sinks(Run(tmp_path / name), Job.from_dict({"run": {"wandb": True}})):
            sink.close()
    assert ids[0] == ids[1] != ids[2]


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
