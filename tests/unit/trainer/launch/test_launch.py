"""train_locally() restarts as often as the job allows, and only where a restart can help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.launch import launch
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
    launched: list[Sequence[str]] = []

    def launch_nothing(arguments: Sequence[str], num_ranks: int, run: Run) -> ExitCode:
        # The step that train.stop_after = 2 asks for.
        run.checkpoint(2).mkdir(parents=True, exist_ok=True)
        launched.append(arguments)
        return codes[len(launched) - 1]

    monkeypatch.setattr(launch, "launch", launch_nothing)
    job = Job.from_dict(tiny_job(tmp_path, run={"max_restarts": max_restarts}, train={"stop_after": stop_after}))
    code = launch.train_locally(job, Run(tmp_path / "run"), 2, ["train"], resume=False)
    assert code is codes[num_launches - 1]
    assert launched == [["train"], *[["train", "--resume"]] * (num_launches - 1)]
