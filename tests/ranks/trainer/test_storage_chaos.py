"""Runs whose checkpoints are damaged, or whose disk fails, end as one without."""

import pytest

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.spec.fault import Fault
from meshwright.spec.storage_fault import DAMAGES, DamageKind
from repository import ROOT
from training_runs import SMALL

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (*SMALL, "train.steps=10", "checkpoint.interval=3", "run.timeout_s=3")


@pytest.mark.long
def test_a_damaged_checkpoint_is_refused_and_costs_the_steps_since_the_one_before() -> None:
    found = mw.chaos(JOB, *KEYS, faults=[Fault(kind="flip-bit", rank=1, step=8, phase="backward")], ranks=2)
    assert found.holds, found.problems
    (outcome,) = found.outcomes
    assert (outcome.refused, outcome.lost_steps) == (True, 4)
    assert outcome.injection.damaged == "step-6"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_survived(kind: DamageKind) -> None:
    found = mw.chaos(JOB, *KEYS, faults=[Fault(kind=kind, rank=0, step=8, phase="optimizer")], ranks=2)
    assert found.holds, found.problems
    assert found.outcomes[0].lost_steps == (1 if kind == "extra-file" else 4)


FAILING_SAVES = (
    Fault(kind="no-space", rank=1, step=3, argument=2),
    Fault(kind="io-error", rank=0, step=6, argument=4),
    Fault(kind="crash", rank=1, step=9, phase="checkpoint", argument=3),
    Fault(kind="slow-disk", rank=0, step=12, argument=0.01),
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_disk_that_fails_costs_no_bit() -> None:
    faults = (
        *FAILING_SAVES,
        Fault(kind="crash", rank=0, step=14, phase="forward"),
        Fault(kind="io-error", rank=1, step=13, phase="restore", argument=2),
    )
    found = mw.chaos(JOB, *KEYS, "checkpoint.mode=sync", "train.steps=15", faults=faults, ranks=2)
    assert found.holds, found.problems
    assert found.num_repairs == 3
    went_on = [one.fault.kind for one in found.outcomes if one.detected_after_s is None]
    assert went_on == ["slow-disk"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_saves_in_the_background_fail_and_training_continues() -> None:
    found = mw.chaos(JOB, *KEYS, "checkpoint.mode=async", "train.steps=15", faults=FAILING_SAVES, ranks=2)
    assert found.holds, found.problems
    assert (found.num_attempts, found.num_repairs) == (1, 0)


def test_a_run_that_keeps_one_checkpoint_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep = 1: after truncate"):
        mw.chaos(JOB, *KEYS, "checkpoint.keep=1", faults=[Fault(kind="truncate", rank=0, step=8)], ranks=2)
