"""checkpoint.export: each checkpoint also as a Hugging Face folder, by a process that training does not wait for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.write import to_toml
from meshwright.errors import ConfigError
from meshwright.spec.job.job import Job
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Manifest, Run
from training_runs import tiny_job


def write_job(folder: Path, **checkpoint: object) -> Path:
    sections = {"layout": {"dp_shard": 1}, "run": {"dir": str(folder / "run")}}
    path = folder / "job.toml"
    path.write_text(to_toml(Job.from_dict(tiny_job(folder, checkpoint={"interval": 2, **checkpoint}, **sections))))
    return path


@pytest.mark.slow
def test_every_kept_checkpoint_has_an_export_across_a_stop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path)
    run = Run(tmp_path / "run")
    assert mw.train(path, "train.stop_after=2").exit_code == 75
    assert not run.exports.exists()
    # What was saved without exports is caught up on, and what a killed process left is removed.
    (run.exports / f"step-2.tmp-{'0' * 32}").mkdir(parents=True)
    assert mw.resume(path, "checkpoint.export=bfloat16").exit_code == 0
    assert "export of step-2 is complete" in capfd.readouterr().out
    assert run.checkpoint_steps() == run.export_steps() == [4, 6]
    assert sorted(folder.name for folder in run.exports.iterdir()) == ["step-4", "step-6"]
    results = Manifest.from_json(run.manifest.read_text()).results["exports"]
    assert (results["newest_step"], results["waiting_steps"], results["num_failed"]) == (6, [], 0)
    for step in (4, 6):
        mw.export(run.folder, tmp_path / f"again-{step}", step=step, dtype="bfloat16")
        for file in run.export(step).iterdir():
            assert file.read_bytes() == (tmp_path / f"again-{step}" / file.name).read_bytes()


def test_a_model_that_has_no_hugging_face_format_is_refused_before_training(tmp_path: Path) -> None:
    path = write_job(tmp_path, export="float32")
    with pytest.raises(
        ConfigError, match=r"checkpoint.export = 'float32', but transformers has no model with qkv_bias"
    ):
        mw.check(path, "model.options.qkv_bias=true", "model.options.qk_norm=true")


@pytest.mark.long
def test_a_run_keeps_its_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    architecture = resolve_architecture(Job.from_dict(tiny_job(tmp_path)).model)
    assert architecture is not None
    config = tmp_path / "config.json"
    config.write_text(json.dumps(architecture_to_hf(architecture)))
    sections = {"layout": {"dp_shard": 1}, "run": {"dir": str(tmp_path / "run")}}
    job = {**tiny_job(tmp_path, checkpoint={"interval": 2}, **sections), "model": {"source": str(config)}}
    path = tmp_path / "job.toml"
    path.write_text(to_toml(Job.from_dict(job)))
    assert mw.train(path, "train.stop_after=2").exit_code == 75
    config.write_text(json.dumps(architecture_to_hf(architecture.replace(norm_eps=0.25))))
    assert mw.resume(path).exit_code == 2
    assert "the model is not that of the checkpoint: norm_eps was " in capfd.readouterr().err
    assert Run(tmp_path / "run").checkpoint_steps() == [2]
