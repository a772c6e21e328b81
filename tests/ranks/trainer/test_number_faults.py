"""Wrong numbers on one rank: with checks the run ends with the bits of a run without the fault, and otherwise not."""

import json
import logging
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError, ExitCode
from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.run.finding import RankFinding, read_findings
from meshwright.spec.run.run import Run
from repository import ROOT
from training_runs import SMALL

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (*SMALL, "train.steps=8", "checkpoint.interval=3", "run.timeout_s=30")
CHECKED = "guards.replica_check_interval=1"
HSDP = ("layout.dp_replicate=2", "layout.dp_shard=2")
REPLICAS = ("layout.dp_replicate=3", "layout.dp_shard=1", "train.global_batch_size=12")
PAIR = ("layout.dp_replicate=2", "layout.dp_shard=1")


def survives(folder: Path, faults: list[Fault], ranks: int, *keys: str) -> list[RankFinding]:
    """Return the events of a run that ended as one without the faults."""
    found = mw.chaos(JOB, *KEYS, *keys, faults=faults, ranks=ranks, keep=folder / "kept")
    assert found.holds, found.problems
    return read_findings(Run(folder / "kept" / "with-faults").findings)


def test_a_flipped_gradient_is_computed_again_and_its_rank_named(tmp_path: Path) -> None:
    events = survives(tmp_path, [Fault(kind="flip-gradient", rank=1, step=5)], 2, *PAIR, CHECKED)
    assert [(event.step, event.ranks, event.action) for event in events] == [(5, (1,), "recompute")]
    assert events[0].tensor is not None
    assert events[0].tensor.startswith("gradient of ")
    assert events[0].hosts[0] in events[0].what


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "ranks", "keys", "action"),
    [
        ("flip-parameter", 2, PAIR, "restore"),
        ("flip-parameter", 3, REPLICAS, "copy"),
        ("flip-gradient", 3, REPLICAS, "recompute"),
        ("nan-gradient", 2, PAIR, "recompute"),
        ("flip-parameter", 4, HSDP, "restore"),
        ("flip-gradient", 4, HSDP, "recompute"),
        ("flip-gradient", 4, ("layout.dp_replicate=2", "layout.dp_shard=1", "layout.tp=2"), "recompute"),
        ("flip-parameter", 4, ("layout.dp_replicate=2", "layout.dp_shard=1", "layout.tp=2"), "restore"),
        ("flip-gradient", 4, ("layout.dp_replicate=2", "layout.dp_shard=1", "layout.pp=2"), "recompute"),
    ],
)
def test_each_kind_is_found_where_replicas_exist(
    tmp_path: Path, kind: FaultKind, ranks: int, keys: tuple[str, ...], action: str
) -> None:
    events = survives(tmp_path, [Fault(kind=kind, rank=1, step=5)], ranks, *keys, CHECKED)
    assert [event.action for event in events] == [action]
    assert 1 in events[0].ranks


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["flip-parameter", "flip-gradient"])
def test_a_check_in_every_fourth_step_finds_it_later(tmp_path: Path, kind: FaultKind) -> None:
    keys = (*PAIR, "guards.replica_check_interval=4", "train.steps=14")
    events = survives(tmp_path, [Fault(kind=kind, rank=0, step=9)], 2, *keys)
    # The state is compared before each checkpoint, too: here after steps 9 and 12.
    assert [(event.step, event.action) for event in events] == [(9, "restore")]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["flip-parameter", "flip-gradient", "nan-gradient", "loss-spike"])
def test_without_checks_the_fault_shows(tmp_path: Path, kind: FaultKind) -> None:
    fault = Fault(kind=kind, rank=1, step=5, argument=100.0 if kind == "loss-spike" else 0.0)
    found = mw.chaos(JOB, *KEYS, *PAIR, faults=[fault], ranks=2, keep=tmp_path / "kept")
    assert not found.holds
    assert found.outcomes[0].injection is not None


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["loss-spike", "flip-gradient", "nan-gradient"])
def test_a_step_computed_twice_needs_no_replicas(tmp_path: Path, kind: FaultKind) -> None:
    fault = Fault(kind=kind, rank=1, step=6, argument=100.0 if kind == "loss-spike" else 0.0)
    events = survives(tmp_path, [fault], 2, "guards.recompute_interval=3")
    assert [(event.step, event.action) for event in events] == [(6, "recompute")]
    assert events[0].ranks == ((1,) if kind == "loss-spike" else ())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rank_that_is_wrong_three_times_ends_the_run(tmp_path: Path) -> None:
    faults = [Fault(kind="flip-gradient", rank=1, step=step) for step in (3, 5, 6)]
    found = mw.chaos(JOB, *KEYS, *PAIR, CHECKED, faults=faults, ranks=2, keep=tmp_path / "kept")
    assert found.exit_code == ExitCode.DO_NOT_RETRY
    events = read_findings(Run(tmp_path / "kept" / "with-faults").findings)
    assert [event.action for event in events] == ["recompute", "recompute", "stop"]
    printed = (tmp_path / "kept" / "with-faults.log").read_text(encoding="utf-8")
    assert f"take {events[0].hosts[0]} out of the run" in printed


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checks_change_no_bit_and_find_nothing_in_a_healthy_run(tmp_path: Path) -> None:
    hashes = []
    for name, keys in (("bare", ()), ("checked", (CHECKED, "guards.recompute_interval=2"))):
        run = Run(tmp_path / name)
        assert mw.train(JOB, *KEYS, *HSDP, *keys, f"run.dir={run.folder}", ranks=4).exit_code == ExitCode.DONE
        hashes.append(json.loads(run.manifest.read_text(encoding="utf-8"))["results"]["parameter_hash"])
        assert read_findings(run.findings) == []
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ((CHECKED,), r"guards\.replica_check_interval = 1 compares copies on different ranks, and"),
        ((*PAIR, CHECKED, "checkpoint.interval=0"), r"checkpoint\.interval = 0 saves only at the end"),
        (("guards.recompute_interval=1", "optimizer.in_backward=true"), r"optimizer\.in_backward = true updates"),
    ],
)
def test_what_rules_a_check_out_is_said(keys: tuple[str, ...], what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(ConfigError, match=what):
        mw.check(JOB, *KEYS, *keys, ranks=2)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "ranks", "keys"),
    [
        ("tiny", 2, (*PAIR, "optimizer.state_dtype=int8")),
        ("tiny", 2, (*PAIR, "optimizer.state_dtype=bfloat16", "precision.compute=bfloat16")),
        ("tiny", 4, (*HSDP, "optimizer.name=muon")),
        ("tiny-moe", 4, ("layout.dp_replicate=2", "layout.dp_shard=2", "layout.ep=2")),
    ],
)
def test_copies_agree_whatever_the_optimizer_and_model(
    tmp_path: Path, job: str, ranks: int, keys: tuple[str, ...]
) -> None:
    run = Run(tmp_path / "run")
    small = ("train.steps=4", "train.seq_len=32", "train.validation_interval=0", "checkpoint.interval=2")
    checks = (CHECKED, "guards.recompute_interval=2")
    ended = mw.train(JOB.with_name(f"{job}.toml"), *small, *keys, *checks, f"run.dir={run.folder}", ranks=ranks)
    assert ended.exit_code == ExitCode.DONE
    assert read_findings(run.findings) == []
