"""The run folder's paths and its manifest."""

from pathlib import Path

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.run import Attempt, Manifest, Run


def test_paths_are_those_of_the_design(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.checkpoint(20) == tmp_path / "checkpoints" / "step-20"
    assert run.rank_log(3) == tmp_path / "logs" / "rank-3.log"
    assert run.checkpoint_steps() == []


def test_only_committed_checkpoints_count_and_they_sort_as_numbers(tmp_path: Path) -> None:
    run = Run(str(tmp_path))
    for name in ("step-100", "step-20", "step-9", "step-30.tmp-abc", "other", "step-"):
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / "step-7").write_text("a file is no checkpoint")
    assert run.checkpoint_steps() == [9, 20, 100]


def test_a_manifest_survives_json() -> None:
    attempt = Attempt(
        started_at="2026-01-01T00:00:00+00:00",
        start_step=0,
        pids=[1, 2],
        hosts=["a", "a"],
        layout=Layout(dp_shard=2),
        versions={"meshwright": "0.1.0"},
        exit=75,
    )
    manifest = Manifest(job=Job(), seed=0, num_parameters=10, attempts=[attempt], results={"loss": 1.5}, exit=75)
    assert Manifest.from_json(manifest.to_json()) == manifest
