"""What is wrong with a run folder is said when it is claimed, not by the first save."""

import os
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.trainer.run.open_run import claim


def test_checkpoints_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    # A folder in which not even root makes files.
    run.checkpoints.symlink_to("/proc/self")
    with pytest.raises(ConfigError, match=r"cannot write into .*/checkpoints: .*: change its permissions, or"):
        claim(run, Job(), resume=True, overwrite=False)


def test_a_file_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    run.checkpoint(6).write_text("no checkpoint", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"step-6 is no folder, as a checkpoint is: move it away"):
        claim(run, Job(), resume=True, overwrite=False)


def test_a_folder_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    os.close(claim(run, Job(), resume=True, overwrite=False))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-3"]


def test_a_file_in_the_place_of_the_checkpoints_is_in_the_way(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.write_text("no folder", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot create the folder .*/checkpoints, a file is in the way: move it"):
        claim(run, Job(), resume=True, overwrite=False)
