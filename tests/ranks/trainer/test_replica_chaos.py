"""Independent replicas under faults: the others train on, the lost one comes back, and no bit and no sample is lost."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events
from meshwright.trainer.run.run_folder import read_manifest
from repository import ROOT
from training_runs import SMALL

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (
    *SMALL,
    "train.steps=60",
    "train.exact_elastic=true",
    "checkpoint.interval=25",
    "run.timeout_s=30",
    "run.hang_limit_s=2",
    "replicas.independent=true",
)
TWO = ("layout.dp_replicate=2", "layout.dp_shard=1")
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "agree", "checkpoint")


@pytest.mark.long
def test_a_program_resumes_what_it_has_stopped(tmp_path: Path) -> None:
    keys = (*KEYS, *TWO, "train.steps=4", "checkpoint.interval=2", f"run.dir={tmp_path / 'run'}")
    mw.train(JOB, *keys, "train.stop_after=2", ranks=2)
    mw.train(JOB, *keys, ranks=2, resume=True)
    manifest = read_manifest(Run(tmp_path / "run"))
    assert manifest is not None
    assert manifest.results["last_step"] == 4
    kinds = [event.kind for event in read_events(Run(tmp_path / "run")) if event.kind in ("launched", "ended")]
    assert kinds == ["launched", "ended"] * 2


def test_a_lost_replica_costs_the_others_no_step_and_comes_back() -> None:
    found = mw.chaos(JOB, *KEYS, *TWO, faults=[Fault(kind="crash", rank=1, step=6, phase="backward")], ranks=2)
    assert found.holds, found.problems
    assert found.outcomes[0].lost_steps == 0
    assert found.outcomes[0].others_after_s < found.outcomes[0].recovered_after_s
    assert "others' next step" in str(found)


@pytest.mark.long
def test_nothing_is_said_of_a_step_after_the_last(tmp_path: Path) -> None:
    faults = [Fault(kind="crash", rank=1, step=4, phase="agree")]
    keys = (*KEYS, *TWO, "train.steps=4")
    assert mw.chaos(JOB, *keys, faults=faults, ranks=2, keep=tmp_path / "kept").holds
    said = (tmp_path / "kept" / "with-faults.log").read_text(encoding="utf-8")
    assert "step 4/4" in said
    assert "step 5 " not in said


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["segfault", "exception", "terminate", "hang", "hold-gil", "stop"])
def test_each_kind_is_survived_by_the_others(kind: FaultKind, rank: int) -> None:
    found = mw.chaos(JOB, *KEYS, *TWO, faults=[Fault(kind=kind, rank=rank, step=8, phase="optimizer")], ranks=2)
    assert found.holds, found.problems
    if kind in ("hang", "hold-gil", "stop"):
        # As long as run.hang_limit_s, as the coordinator has seen it.
        assert found.goodput is not None
        assert found.goodput.hang_s >= 2
    assert found.outcomes[0].lost_steps == 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_in_each_phase_is_survived_by_the_others(phase: str) -> None:
    step = 25 if phase == "checkpoint" else 8
    found = mw.chaos(JOB, *KEYS, *TWO, faults=[Fault(kind="crash", rank=0, step=step, phase=phase)], ranks=2)
    assert found.holds, found.problems


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2,dp_shard=1", "pp=2,dp_shard=1", "cp=2,dp_shard=1"])
def test_replicas_of_several_ranks_are_lost_and_replaced_whole(layout: str) -> None:
    keys = ["layout.dp_replicate=2", *(f"layout.{key}" for key in layout.split(","))]
    faults = [
        Fault(kind="crash", rank=3, step=6, phase="backward"),
        Fault(kind="stop", rank=0, step=20, phase="forward"),
        Fault(kind="crash", rank=2, step=40, phase="gradients"),
    ]
    found = mw.chaos(JOB, *KEYS, *keys, faults=faults, ranks=4)
    assert found.holds, found.problems


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["forward", "backward", "gradients", "optimizer"])
def test_one_that_is_lost_again_and_again_while_it_receives_the_state(phase: str) -> None:
    """Of a replica that returns, the first step is the one in which it receives the state, whichever that is."""
    faults = [Fault(kind="crash", rank=1, step=step, phase=phase) for step in range(6, 30)]
    found = mw.chaos(JOB, *KEYS, *TWO, faults=faults, ranks=2)
    assert found.holds, found.problems
    assert sum(outcome.injection is not None for outcome in found.outcomes) > 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_of_three_are_lost_at_once_and_then_all() -> None:
    faults = [
        *(Fault(kind="crash", rank=rank, step=10, phase="backward") for rank in (0, 2)),
        *(Fault(kind="crash", rank=rank, step=40, phase="forward") for rank in (0, 1, 2)),
    ]
    keys = ("layout.dp_replicate=3", "layout.dp_shard=1", "train.global_batch_size=6", "layout.microbatch_size=1")
    found = mw.chaos(JOB, *KEYS, *keys, faults=faults, ranks=3)
    assert found.holds, found.problems


def test_ignored_targets_count_over_all_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of one's own, whose samples ignore different numbers of targets: the mean is over those of all replicas."""
    (tmp_path / "masked.py").write_text(MASKED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = ("data.source=masked:Masked", "data.validation_fraction=0", "train.steps=6", "train.global_batch_size=8")
    hashes = set()
    for ranks, *layout in (
        (1, "layout.dp_replicate=1", "replicas.independent=false"),
        (2, "layout.dp_replicate=2", "replicas.independent=true"),
    ):
        keys = (*KEYS, *own, *layout, "layout.dp_shard=1", f"run.dir={tmp_path}/run-{ranks}")
        assert mw.train(JOB, *keys, ranks=ranks).exit_code == 0
        manifest = read_manifest(Run(tmp_path / f"run-{ranks}"))
        assert manifest is not None
        hashes.add(manifest.results["parameter_hash"])
    assert len(hashes) == 1


MASKED = """
import torch


class Masked:
    vocab_size = 256

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[: index * 7 % 30] = -100
        return tokens[:-1], targets
"""
