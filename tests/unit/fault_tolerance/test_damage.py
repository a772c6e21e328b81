"""A damaged newest checkpoint is refused, and the one before is loaded."""

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.checkpoint import load_newest, save
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.storage.damage import can_damage, damage_newest
from meshwright.fault_tolerance.storage.storage_problems import storage_problems
from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DAMAGES, HARMLESS_DAMAGES, DamageKind


def state_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    values = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(3000, generator=values), "zeros": torch.zeros(3000)}}


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "swap-shards"])
@pytest.mark.parametrize("number", range(3))
def test_the_newest_is_refused_and_the_one_before_loaded(tmp_path: Path, kind: DamageKind, number: int) -> None:
    run = Run(tmp_path)
    save(run.checkpoint(3), state_of(3), {"step": 3})
    assert not can_damage(run)
    save(run.checkpoint(6), state_of(6), {"step": 6})
    assert damage_newest(run, Fault(kind=kind, rank=0), number) == "step-6"
    found = state_of(0)
    loaded = load_newest(run, found)
    expected = 6 if kind in HARMLESS_DAMAGES else 3
    assert loaded is not None
    assert loaded[0] == expected
    assert torch.equal(found["model"]["w"], state_of(expected)["model"]["w"])
    assert bool(list(run.checkpoints.glob("step-6.damaged-*"))) == (expected == 3)


def test_files_of_two_ranks_are_exchanged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (3, 6):
        save(run.checkpoint(step), state_of(step), {"step": step})
    with pytest.raises(ConfigError, match="one data file only"):
        damage_newest(run, Fault(kind="swap-shards", rank=0), 0)
    (run.checkpoint(6) / "rank-00001.bin").write_bytes(b"of rank 1")
    damage_newest(run, Fault(kind="swap-shards", rank=0), 0)
    assert (run.checkpoint(6) / "rank-00000.bin").read_bytes() == b"of rank 1"


@pytest.mark.parametrize(
    ("fault", "checkpoint", "what"),
    [
        (Fault(kind="truncate", rank=0), {"interval": 0}, "checkpoint.interval = 0: truncate damages a checkpoint"),
        (Fault(kind="flip-bit", rank=0), {"keep": 1}, "checkpoint.keep = 1: after flip-bit"),
        (Fault(kind="swap-shards", rank=0), {}, 'kind = "swap-shards": exchanges the files of two ranks'),
        (Fault(kind="no-space", rank=0, phase="restore"), {}, 'phase = "restore" of no-space'),
        (Fault(kind="io-error", rank=0, phase="forward"), {}, 'phase = "forward" of io-error: must be one of'),
        (Fault(kind="slow-disk", rank=0), {}, "argument = 0 of a slow-disk: say how many seconds"),
        (Fault(kind="crash", rank=0, argument=3.0), {}, "argument = 3 of a crash: counts calls"),
    ],
)
def test_what_cannot_be_injected_is_refused_by_key(fault: Fault, checkpoint: dict[str, int], what: str) -> None:
    job = Job.from_dict({"checkpoint": checkpoint})
    (problem,) = storage_problems([fault], job, 1)
    assert what in problem


def test_what_can_be_injected_is_not_refused() -> None:
    faults = [Fault(kind=kind, rank=0, step=9, phase="backward") for kind in DAMAGES]
    faults += [Fault(kind="crash", rank=0, phase="checkpoint", argument=3.0), Fault(kind="no-space", rank=1)]
    assert not storage_problems(faults, Job.from_dict({}), 2)
