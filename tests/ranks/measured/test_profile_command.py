"""`meshwright profile`: steps of a job on two ranks, taken apart; and what it refuses before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import run
from meshwright.errors import ConfigError, ExitCode
from training_runs import TINY_MODEL


def write_job(folder: Path) -> Path:
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{n} times {n} is {n * n}; the root of {n * n} is {n}.\n" for n in range(1500)))
    options = ", ".join(f"{name} = {value}" for name, value in TINY_MODEL["options"].items())  # type: ignore[attr-defined]
    job = folder / "job.toml"
    job.write_text(
        f'[model]\nsource = "llama-1m"\noptions = {{ {options} }}\n'
        f'[data]\nsource = "{corpus}"\ncache_dir = "{folder / "cache"}"\n'
        "[train]\nsteps = 4\nseq_len = 32\nglobal_batch_size = 8\n"
        '[layout]\ndp_shard = -1\nmicrobatch_size = 2\n[run]\ndevice = "cpu"\n'
    )
    return job


def test_a_profile_is_a_step_of_the_job_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job, out = write_job(tmp_path), tmp_path / "kept"
    # Five steps, one more than the job has.
    arguments = ["profile", str(job), "--ranks", "2", "--steps", "2", "--warm-up", "1", "--out", str(out), "--json"]
    assert run(arguments) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    waterfall = record["waterfall"]
    assert (waterfall["source"], waterfall["num_ranks"], waterfall["num_steps"]) == ("profile", 2, 2)
    assert (waterfall["timed"], waterfall["step"] in (4, 5)) == ("steps 2 to 3", True)
    assert {"model_flops_at_peak_s", "dp_communication_s", "stragglers_s"} <= waterfall["measured"].keys()
    assert waterfall["predicted"]["dp_communication_s"] > 0
    assert len(list((out / "timelines").glob("step-4-rank-*.json.gz"))) == 2
    assert not (tmp_path / "runs").exists()
    # The folder is one that two steps are compared from; and it is never written to a second time.
    compared = mw.compare(out, out)
    assert compared.a.step_s == compared.b.step_s > 0
    with pytest.raises(ConfigError, match=r"out=.* exists and is no empty folder: name a new folder"):
        mw.profile(job, ranks=2, out=out)


def test_what_cannot_be_profiled_is_refused_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = str(write_job(tmp_path))
    for words, refused in (
        (["--steps", "0"], "--steps 0 must be 1 or more"),
        (["--warm-up", "-1"], "--warm-up -1 must be 0 or more"),
        (["--ranks", "3"], "layout.microbatch_size"),
        (["train.stepz=3"], "did you mean"),
    ):
        assert run(["profile", job, *words]) == ExitCode.BAD_INPUT
        assert refused in " ".join(capsys.readouterr().err.split())
    assert "run.dir" not in caplog.text
    assert run(["profile", job, "--ranks", "3", "run.dir=mine"]) == ExitCode.BAD_INPUT
    assert "profile writes nothing to run.dir: --out FOLDER keeps its traces" in caplog.text
    monkeypatch.setenv("RANK", "0")
    assert run(["profile", job]) == ExitCode.BAD_INPUT
    assert "profile starts its own ranks" in capsys.readouterr().err
