"""A rank that is slower than the others is named by the run; equally fast ranks are not."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.spec.fault import Fault
from meshwright.spec.run.finding import read_findings
from meshwright.spec.run.run import Run
from repository import ROOT
from training_runs import SMALL

JOB = ROOT / "examples" / "tiny.toml"
KEYS = (*SMALL, "train.steps=40", "checkpoint.interval=0")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_slow_rank_is_named_with_its_phase_and_host(tmp_path: Path) -> None:
    fault = Fault(kind="slow-rank", rank=1, argument=3.0)
    found = mw.chaos(JOB, *KEYS, faults=[fault], ranks=2, keep=tmp_path / "kept")
    assert found.holds, found.problems
    run = Run(tmp_path / "kept" / "with-faults")
    slow = [event for event in read_findings(run.findings) if event.kind == "straggler"]
    assert slow, (tmp_path / "kept" / "with-faults.log").read_text(encoding="utf-8")
    assert {event.ranks for event in slow} == {(1,)}
    # It sleeps as the gradients are finished.
    assert slow[0].phase == "gradients"
    # The first 8 steps warm up, and 16 are compared.
    assert slow[0].step == 24
    assert "rank 1" in str(mw.report(run.folder))
    printed = (tmp_path / "kept" / "with-faults.log").read_text(encoding="utf-8")
    assert printed.count("as long in gradients as the median of the other ranks") == 1
