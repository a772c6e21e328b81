"""`read_own_run`: a run folder counts as one measured run, and what is no such folder is told."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.own_run import read_own_run
from meshwright.evaluation.fitting.given_runs import calibrate_given
from meshwright.spec.run.run import Run
from meshwright.trainer.run import run_folder
from written_runs import STEPS, write_run


def test_the_newest_attempts_layout_and_median_step(tmp_path: Path) -> None:
    earlier = [{"step": 1, "step_ms": 5000.0, "attempt": 1}] * 9
    validation = {"step": 5, "validation_loss": 2.0, "attempt": 2}
    run = read_own_run(write_run(tmp_path / "mine", [*earlier, *STEPS, validation]))
    assert run.row.measured_s == pytest.approx(0.101)
    assert run.layout is not None
    assert run.layout.dp_shard == 4
    assert run.setup is not None
    assert (run.setup.cluster.num_devices, run.setup.stack.kernels) == (4, "compiled")


def test_it_calibrates_our_stack(tmp_path: Path) -> None:
    (calibration,) = calibrate_given([write_run(tmp_path / "mine", STEPS)]).values()
    assert (calibration.stack, calibration.num_runs) == ("meshwright", 1)


@pytest.mark.parametrize(
    ("metrics", "num_attempts", "message"),
    [
        (STEPS[:5], 2, "5 steps"),
        ([], 2, "0 steps"),
        (STEPS, 0, "has not started"),
        ([{"step_ms": [], "attempt": 2}], 2, "metrics"),
        (STEPS, 1, "steps of start 2 of the ranks, of which manifest.json lists 1"),
    ],
)
def test_a_run_that_was_not_timed_is_refused(
    tmp_path: Path, metrics: list[dict[str, Any]], num_attempts: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_own_run(write_run(tmp_path / "mine", metrics, num_attempts))


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        calibrate_given([tmp_path])
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no manifest"):
        calibrate_given([tmp_path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "manifest.json is damaged or cut off: EOF while parsing an object at line 1 column 1: restore it"),
        (b'{"seed": 1', "manifest.json is damaged or cut off: EOF while parsing"),
        (b"\xff{}", "manifest.json is damaged: invalid start byte at byte 0: restore it"),
        (b'{"schema_version": 2}', r"is no manifest of this version \(schema_version: "),
    ],
)
def test_what_is_wrong_with_a_manifest_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_own_run(tmp_path)
    with pytest.raises(ConfigError, match=message):  # what `train --resume` says of it
        run_folder.read_manifest(Run(tmp_path))
