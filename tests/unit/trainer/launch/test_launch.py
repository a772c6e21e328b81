"""train_locally() restarts as often as the job allows, and only where a restart can help."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.errors import ExitCode, Preempted
from meshwright.fault_tolerance.hangs.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.spec.job.job import Job
from meshwright.trainer.launch import launch
from meshwright.trainer.launch.local.local_rank_group import LocalRankGroup
from meshwright.trainer.launch.rank import RankConfig, preempt_on_sigterm
from training_runs import tiny_job

RETRY, DONE = ExitCode.RETRY, ExitCode.DONE


@pytest.mark.parametrize(
    ("codes", "max_restarts", "stop_after", "num_launches"),
    [
        ([RETRY, RETRY, DONE], 2, None, 3),
        ([RETRY, RETRY, RETRY], 1, None, 2),
        ([RETRY], 0, None, 1),
        ([RETRY], 5, 2, 1),
        ([RETRY, DONE], 5, 4, 2),
        ([ExitCode.DO_NOT_RETRY], 5, None, 1),
        ([DONE], 5, None, 1),
    ],
)
def test_a_lost_rank_is_started_again_from_the_newest_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[ExitCode],
    max_restarts: int,
    stop_after: int | None,
    num_launches: int,
) -> None:
    resumes: list[bool] = []

    def launch_nothing(config: RankConfig, num_ranks: int, stops: StopSignals, watch: LauncherWatch) -> ExitCode:
        # The step that train.stop_after = 2 asks for.
        config.run.checkpoint(2).mkdir(parents=True, exist_ok=True)
        resumes.append(config.resume)
        return codes[len(resumes) - 1]

    monkeypatch.setattr(launch, "launch", launch_nothing)
    run = {"max_restarts": max_restarts, "restart_backoff_s": 0.0}
    job = Job.from_dict(tiny_job(tmp_path, run=run, train={"stop_after": stop_after}))
    config = RankConfig(job=job, run_dir=str(tmp_path / "run"), module_dir=str(tmp_path))
    assert launch.train_locally(config, 2) is codes[num_launches - 1]
    assert resumes == [False, *[True] * (num_launches - 1)]


def test_restarts_that_reach_no_step_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(launch, "launch", lambda *arguments: RETRY)
    monkeypatch.setattr(StopSignals, "sleep", lambda stops, seconds: delays.append(seconds))
    job = Job.from_dict(tiny_job(tmp_path, run={"max_restarts": 4, "restart_backoff_s": 3.0}))
    assert (
        launch.train_locally(RankConfig(job=job, run_dir=str(tmp_path / "run"), module_dir=str(tmp_path)), 2) is RETRY
    )
    assert delays == [0, 3, 6, 12]


def test_a_signal_between_two_attempts_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_nothing(*arguments: object, **named: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(LocalRankGroup, "start", start_nothing)
    job = Job.from_dict(tiny_job(tmp_path))
    config = RankConfig(job=job, run_dir=str(tmp_path / "run"), module_dir=str(tmp_path))
    with StopSignals() as stops:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="SIGTERM: no rank was running; continue with --resume"):
            launch.launch(config, 2, stops, LauncherWatch(config.run, job.run))


def test_sigterm_counts_until_training_begins_and_changes_nothing_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launch", lambda *arguments: DONE)
    config = RankConfig(job=Job.from_dict(tiny_job(tmp_path)), run_dir=str(tmp_path / "run"), module_dir=str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    try:
        preempt_on_sigterm()
        with pytest.raises(Preempted, match="before training began"):
            signal.raise_signal(signal.SIGTERM)
        assert launch.train_locally(config, 1) is DONE
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
