"""`import meshwright as mw`: every command as a function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError, InfeasibleLayout
from written_runs import STEPS, write_run


def test_the_import_takes_no_torch_and_nothing_heavy() -> None:
    code = "import sys, meshwright; print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_each_name_is_a_documented_function() -> None:
    for name in mw.__all__:
        assert getattr(mw, name).__doc__
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mw.trian  # type: ignore[attr-defined]


def test_a_model_and_a_job_are_planned_alike(tmp_path: Path) -> None:
    named = mw.plan(model="llama3-8b", cluster="h100-ib400:16", seq_len=8192, global_batch_size=64, simulate=0)
    file = tmp_path / "job.toml"
    file.write_text(
        '[model]\nsource = "llama3-8b"\n[train]\nseq_len = 8192\nglobal_batch_size = 64\n[precision]\n'
        'compute = "bfloat16"\n[cluster]\nname = "h100-ib400"\nnum_devices = 16\n'
    )
    of_job = mw.plan(mw.load_job(file), simulate=0)
    assert of_job.pick.layout == named.pick.layout
    assert of_job.pick.estimate.step == named.pick.estimate.step
    kept = mw.plan(file, "layout.tp=8", simulate=0)
    assert kept.pick.layout.tp == 8


def test_check_says_what_a_job_does_and_all_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nsource = "llama-1m"\n')
    assert "llama-1m" in str(mw.check(file))
    with pytest.raises(ConfigError, match="2 problems"):
        mw.check(file, "train.steps=0", "layout.tp=3")
    misfit = mw.check(file, "model.source=llama3-70b", "cluster.name=h100-ib400", "layout.dp_shard=8").misfit
    assert isinstance(misfit, InfeasibleLayout)


def test_a_run_is_reported(tmp_path: Path) -> None:
    found = mw.report(write_run(tmp_path / "mine", STEPS))
    assert found.measured_s == pytest.approx(0.101)
