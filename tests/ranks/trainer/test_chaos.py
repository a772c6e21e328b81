"""A run with faults ends as one without, and a run that cannot is found out."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import read_manifest
from meshwright.trainer.run.save_schedule import FIRST_SAVE
from repository import ROOT
from training_runs import SMALL

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (*SMALL, "train.steps=8", "checkpoint.interval=3", "run.timeout_s=3")
FORGETFUL = """
class Drawn:
    \"\"\"Samples that depend on which were read before; read twice, one is the same.\"\"\"

    vocab_size = 256

    def __init__(self):
        self._places = {}

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        start = self._places.setdefault(index, len(self._places))
        tokens = [(start + place) % 251 for place in range(33)]
        return tokens[:-1], tokens[1:]
"""


def test_a_crash_costs_the_steps_since_the_checkpoint_and_no_bit() -> None:
    fault = Fault(kind="crash", rank=1, step=6, phase="backward")
    found = mw.chaos(JOB, *KEYS, "run.timeout_s=60", faults=[fault], ranks=2)
    assert found.holds, found.problems
    assert found.num_attempts == 2
    assert found.outcomes[0].lost_steps == 2
    assert found.outcomes[0].recovered_after_s > found.outcomes[0].detected_after_s > 0
    assert "Survived" in str(found)
    parts = found.goodput
    assert min(parts.productive_s, parts.repeated_s, parts.checkpoint_s, parts.start_up_s, parts.restart_s) > 0
    assert parts.hang_s == parts.stopped_s == 0
    # All but the launcher's own work before and after.
    assert parts.total_s <= found.disturbed_s
    assert "restarts" in str(found)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_saves_after_steps_that_the_run_chooses_change_no_bit(tmp_path: Path) -> None:
    # A failure in a few seconds: so often that the run saves again soon.
    auto = ("checkpoint.interval=auto", "cluster.failures_per_device_day=20000", "train.steps=30", "run.timeout_s=60")
    faults = [
        Fault(kind="crash", rank=1, step=14, phase="backward"),
        Fault(kind="hang", rank=0, step=28, phase="optimizer"),
    ]
    kept = tmp_path / "kept"
    found = mw.chaos(JOB, *KEYS, *auto, "checkpoint.keep=99", "run.hang_limit_s=3", faults=faults, ranks=2, keep=kept)
    assert found.holds, found.problems
    assert found.goodput.hang_s > 3
    run = Run(kept / "with-faults")
    chosen = read_manifest(run).results["checkpoint_interval"]
    assert chosen["steps"] >= 1
    assert chosen["mtbf_s"] == pytest.approx(86_400 / 40_000)
    assert FIRST_SAVE in run.checkpoint_steps()
    assert found.outcomes[0].lost_steps == 3


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["segfault", "abort", "exception", "terminate", "hang", "hold-gil", "stop"])
def test_each_kind_is_survived(kind: FaultKind) -> None:
    found = mw.chaos(JOB, *KEYS, faults=[Fault(kind=kind, rank=0, step=5, phase="optimizer")], ranks=2)
    assert found.holds, found.problems
    assert found.num_attempts == 2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "pp=2,dp_shard=2"])
def test_faults_in_every_phase_are_survived(layout: str) -> None:
    phases = ("data", "forward", "gradients", "agree", "checkpoint")
    steps = (2, 4, 5, 7, 9)
    faults = [
        Fault(kind="crash", rank=place % 4, step=step, phase=phase)
        for place, (step, phase) in enumerate(zip(steps, phases, strict=True))
    ]
    keys = [f"layout.{key}" for key in layout.split(",")]
    found = mw.chaos(JOB, *KEYS, *keys, "train.steps=10", "checkpoint.interval=3", faults=faults, ranks=4)
    assert found.holds, found.problems


def test_a_data_set_that_forgets_where_it_was_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL, encoding="utf-8")
    job = tmp_path / "job.toml"
    job.write_text(JOB.read_text(encoding="utf-8"), encoding="utf-8")
    source = ("data.source=forgetful:Drawn", "data.validation_fraction=0", "data.tokenizer=bytes")
    kept = tmp_path / "kept"
    found = mw.chaos(
        job, *KEYS, *source, "data.max_bytes=200000", faults=[Fault(kind="crash", rank=0, step=5)], ranks=1, keep=kept
    )
    assert not found.holds
    assert any("the same ones with other values, at slot" in problem for problem in found.problems)
    assert any("the final parameters are not those" in problem for problem in found.problems)
    assert (kept / "with-faults" / "manifest.json").exists()
    assert (kept / "with-faults.log").exists()


def test_a_job_that_fails_without_faults_says_why(tmp_path: Path) -> None:
    of_index, of_read = "setdefault(index,", "setdefault(len(self._places),"
    (tmp_path / "drawing.py").write_text(FORGETFUL.replace(of_index, of_read), encoding="utf-8")
    job = tmp_path / "job.toml"
    job.write_text(JOB.read_text(encoding="utf-8"), encoding="utf-8")
    source = ("data.source=drawing:Drawn", "data.validation_fraction=0", "data.tokenizer=bytes")
    with pytest.raises(ConfigError, match=r"exit code 2 .*has different values when it is read twice"):
        mw.chaos(job, *KEYS, *source, faults=[Fault(kind="crash", rank=0, step=5)], ranks=1)


def test_the_fewest_faults_that_fail_are_found(tmp_path: Path) -> None:
    source = tmp_path / "forgetful.py"
    source.write_text(FORGETFUL, encoding="utf-8")
    job = tmp_path / "job.toml"
    job.write_text(JOB.read_text(encoding="utf-8"), encoding="utf-8")
    faults = [Fault(kind="slow-rank", rank=0, step=2, argument=2.0), Fault(kind="crash", rank=0, step=5)]
    keys = ("data.source=forgetful:Drawn", "data.validation_fraction=0")
    found = mw.chaos(job, *KEYS, *keys, faults=faults, ranks=1, shrink=True, keep=tmp_path / "kept")
    assert found.smallest == (faults[1],)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({}, "give either faults"),
        ({"random": 2, "faults": [Fault(kind="crash", rank=0)]}, "give either faults"),
        ({"random": 9}, "9 random faults in 8 steps"),
        ({"faults": []}, r"faults = \[\]: give one or more"),
        ({"faults": "none.toml"}, r"none\.toml: No such file"),
        ({"faults": [Fault(kind="crash", rank=2, step=1)]}, "rank = 2, and there are 2"),
        ({"faults": [Fault(kind="crash", rank=2, step=9)]}, r"the list of faults has 2 problems:\n  1\. fault 1"),
        ({"faults": [Fault(kind="crash", rank=0, phase="validation")]}, r'phase = "validation".* no step has one'),
    ],
)
def test_what_cannot_be_done_is_said_before_any_rank_starts(asked: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        mw.chaos(JOB, *KEYS, **asked, ranks=2)


def test_several_problems_are_those_of_the_faults_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[[faults]]\nkind = "crash"\nrank = 2\nstep = 9\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.toml has 2 problems:\n  1\. fault 1 \(crash\): rank = 2"):
        mw.chaos(JOB, *KEYS, faults=file, ranks=2)


def test_a_job_that_fails_by_itself_is_no_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    faults = [Fault(kind="crash", rank=0, step=2)]
    with pytest.raises(MeshwrightError, match="already the run without faults ended with exit code 70"):
        mw.chaos(JOB, *KEYS, "optimizer.learning_rate=1e30", faults=faults, ranks=1)
