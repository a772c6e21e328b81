"""Steps that would spoil the model are skipped; after several the run returns to a checkpoint, without their data."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import ConfigError, ExitCode
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_report import read_metrics, row_of

SOURCE = """
import numpy as np
import torch
from torch import nn

class Poisoned:
    \"\"\"A linear map of 8 to 2 numbers; the samples [start, end) are wrong by a factor.\"\"\"

    def __init__(self, start=0, end=0, factor="nan"):
        self.start, self.end, self.factor = start, end, float(factor)

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        x = random.standard_normal(8).astype(np.float32)
        y = np.stack([x.sum(), x[0] - x[1]]).astype(np.float32)
        return (x * np.float32(self.factor) if self.start <= index < self.end else x), y

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 2)

    def forward(self, x):
        return self.map(x)

    def loss(self, found, expected):
        return (found - expected).square().mean()
"""
BATCH = 8


class Case:
    """A job of 24 steps whose steps [first, last] read bad samples."""

    def __init__(self, folder: Path, first: int, last: int, factor: str = "nan") -> None:
        self.folder = folder
        (folder / "poisoned.py").write_text(SOURCE, encoding="utf-8")
        (folder / "job.toml").write_text(
            f"""
[model]
source = "poisoned:Linear"
[data]
source = "poisoned:Poisoned"
shuffle = false
validation_fraction = 0.0
options = {{ start = {(first - 1) * BATCH}, end = {last * BATCH}, factor = "{factor}" }}
[train]
steps = 24
global_batch_size = {BATCH}
[optimizer]
learning_rate = 0.1
schedule = "constant"
warmup_steps = 0
max_grad_norm = 0.0
[checkpoint]
interval = 4
[layout]
dp_shard = -1
""",
            encoding="utf-8",
        )

    def train(self, name: str, *keys: str, ranks: int = 1, **options: bool) -> Run:
        """Train, and return the run, which must have ended with 0, or 75 where it was to stop."""
        run = Run(self.folder / name)
        ended = mw.train(self.folder / "job.toml", f"run.dir={run.folder}", *keys, ranks=ranks, **options)
        stops = any(key.startswith("train.stop_after") for key in keys)
        assert ended.exit_code == (ExitCode.RETRY if stops else ExitCode.DONE)
        return run


def hash_of(run: Run) -> str:
    manifest = json.loads(run.manifest.read_text(encoding="utf-8"))
    found: str = manifest["results"]["parameter_hash"]
    return found


def losses_of(run: Run) -> list[tuple[int, float]]:
    rows = [row_of(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


SKIP = "guards.not_finite=skip"


def test_without_guards_a_step_that_is_not_finite_stops_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path, 6, 6)
    # Only the first sample of the batch is bad.
    of_rank_0 = f"data.options.end={5 * BATCH + 1}"
    ended = mw.train(tmp_path / "job.toml", f"run.dir={tmp_path / 'run'}", of_rank_0, ranks=2)
    assert ended.exit_code == ExitCode.DO_NOT_RETRY
    assert case.folder == tmp_path
    said = " ".join(capfd.readouterr().err.split())
    assert "only the loss of rank 0 is not finite: lower optimizer.learning_rate" in said
    assert 'guards.not_finite = "skip" skips the updates of such steps' in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_leaves_the_model_as_it_was(tmp_path: Path, ranks: int) -> None:
    run = Case(tmp_path, 6, 7).train("run", SKIP, "checkpoint.keep=10", "checkpoint.interval=1", ranks=ranks)
    steps, losses = zip(*losses_of(run), strict=True)
    assert steps == tuple(range(1, 25))
    assert [step for step, loss in zip(steps, losses, strict=True) if not np.isfinite(loss)] == [6, 7]
    assert read_metrics(run).steps_skipped.tolist() == [6, 7]
    # No checkpoint is saved while the model may be spoiled.
    assert 6 not in run.checkpoint_steps()
    assert losses[-1] < losses[0] / 2


def test_several_in_a_row_return_to_the_checkpoint_and_leave_their_data_out(tmp_path: Path) -> None:
    run = Case(tmp_path, 6, 9).train("run", SKIP, "guards.max_skips=3")
    steps = [step for step, _ in losses_of(run)]
    # Steps 6 to 8 are skipped. From step 4 on the data of steps 5 to 8 is left out: step 5 reads what 9 would have.
    assert steps == [*range(1, 9), *range(5, 25)]
    again = dict(losses_of(run)[8:])
    assert not np.isfinite(again[5])
    assert np.isfinite(again[6])
    manifest = json.loads(run.manifest.read_text(encoding="utf-8"))
    assert manifest["results"]["last_step"] == 24


def test_a_spike_is_skipped(tmp_path: Path) -> None:
    keys = ("guards.spike_deviations=8.0", "guards.window=8")
    run = Case(tmp_path, 12, 12, "40").train("guarded", *keys)
    bare = Case(tmp_path, 12, 12, "40").train("bare")
    guarded, unguarded = dict(losses_of(run)), dict(losses_of(bare))
    assert guarded[12] == unguarded[12] > 100 * guarded[11]
    assert hash_of(run) != hash_of(bare)
    assert dict(losses_of(run))[24] < guarded[1]


@pytest.mark.parametrize("stop_after", [7, *(pytest.param(step, marks=pytest.mark.long) for step in (5, 8, 14))])
def test_a_run_that_was_stopped_decides_as_one_that_was_not(tmp_path: Path, stop_after: int) -> None:
    keys = (SKIP, "guards.spike_deviations=8.0", "guards.window=8")
    whole = Case(tmp_path, 6, 9).train("whole", *keys)
    case = Case(tmp_path, 6, 9)
    case.train("parts", *keys, f"train.stop_after={stop_after}")
    assert hash_of(case.train("parts", *keys, resume=True)) == hash_of(whole)


def test_rollbacks_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    Case(tmp_path, 6, 24 * 3)
    job = tmp_path / "job.toml"
    ended = mw.train(job, f"run.dir={tmp_path / 'run'}", SKIP, "guards.max_rollbacks=1", ranks=1)
    assert ended.exit_code == ExitCode.DO_NOT_RETRY
    assert Run(tmp_path / "run").checkpoint_steps() == [4]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (("optimizer.in_backward=true",), r"optimizer\.in_backward = true updates parameters before"),
        (("checkpoint.interval=0",), r"checkpoint\.interval = 0 saves only at the end"),
        (("checkpoint.interval=auto",), r'checkpoint\.interval = "auto" saves after steps that follow from'),
    ],
)
def test_what_rules_guards_out_is_said(tmp_path: Path, keys: tuple[str, ...], what: str) -> None:
    Case(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match=what):
        mw.train(tmp_path / "job.toml", SKIP, *keys, ranks=1)
