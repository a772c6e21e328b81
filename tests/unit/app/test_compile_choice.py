"""layout.compile = "auto": what it comes to on an accelerator and on a processor, and that every verb settles it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.app.check import estimate
from meshwright.app.job import compile_choice
from meshwright.app.job.compile_choice import choose_compile, settle_compile, settle_for_training, settled_on
from meshwright.config.load import ResolvedJob, load_job
from meshwright.cost.compile_time import compile_s, num_kinds, saved_s
from meshwright.errors import ConfigError
from meshwright.evaluation.dataset.own_run import read_manifest
from meshwright.hardware.choice import choose_cluster
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.run.run import Run
from written_runs import STEPS, write_run


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "cpp_compiler", lambda: "c++")


def job(folder: Path, *overrides: str) -> ResolvedJob:
    file = folder / "job.toml"
    file.write_text('[model]\nsource = "llama-1m"\n[layout]\ncompile = "auto"\ndp_shard = 2\n')
    return load_job(file, overrides)


def test_an_accelerator_compiles_all_but_what_would_run_twice(tmp_path: Path) -> None:
    assert choose_compile(job(tmp_path), 2, is_accelerator=True).compiles
    for keys in (
        ("layout.dp_shard=1", "layout.pp=2", "layout.schedule=ZBVZeroBubble"),
        ("layout.dp_shard=1", "layout.cp=2", "layout.cp_method=ring", "layout.activation_checkpoint=selective"),
    ):
        assert not choose_compile(job(tmp_path, *keys), 2, is_accelerator=True).compiles


def test_a_processor_compiles_where_the_run_is_long_enough(tmp_path: Path) -> None:
    short = choose_compile(job(tmp_path, "train.steps=20"), 2, is_accelerator=False)
    long = choose_compile(job(tmp_path, "train.steps=1000000"), 2, is_accelerator=False)
    assert (short.compiles, long.compiles) == (False, True)
    assert "20 steps" in short.text
    assert short.text.count("\n") == 0


def test_a_model_of_your_own_is_compiled_only_where_its_job_says_so(tmp_path: Path) -> None:
    resolved = job(tmp_path, "model.source=my_model:Model")
    assert not choose_compile(resolved, 2, is_accelerator=True).compiles


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "cpp_compiler", lambda: None)
    assert "meshwright doctor" in choose_compile(job(tmp_path), 2, is_accelerator=False).reason


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved = job(tmp_path, "train.steps=20", "run.device=cpu")
    with caplog.at_level("INFO"):
        assert settle_for_training(resolved, 2).job.layout.compile is False
    assert "layout.compile = none, since 20 steps" in caplog.text
    write_run(tmp_path / "run", STEPS, num_attempts=2)
    before = read_manifest(Run(tmp_path / "run"))
    assert before.attempts[-1].layout.compile is True
    assert settle_for_training(resolved, 2, before).job.layout.compile is True


def test_what_a_job_sets_stays(tmp_path: Path) -> None:
    for word, value in (("blocks", True), ("none", False)):
        settled, choice = settle_compile(job(tmp_path, f"layout.compile={word}"), 2, is_accelerator=True)
        assert (settled.job.layout.compile, choice) == (value, None)


def test_a_prediction_is_of_what_would_train(tmp_path: Path) -> None:
    on = ("cluster.name=h100-ib400", "cluster.num_devices=2", "precision.compute=bfloat16")
    settled = settled_on(job(tmp_path, *on), choose_cluster("h100-ib400:2"))
    assert settled.job.layout.compile is True
    auto, compiled = (estimate(job(tmp_path, *on, f"layout.compile={how}"), None) for how in ("auto", "blocks"))
    assert auto == compiled


def test_compilation_takes_as_long_as_its_kinds_and_its_share_of_the_cores() -> None:
    assert compile_s(1, 2, 2) == compile_s(1, 1, 2) < compile_s(2, 1, 2)
    assert compile_s(1, 4, 2) == 2 * compile_s(1, 2, 2)
    assert saved_s(20, 1.0) == 2 * saved_s(10, 1.0)


def test_equal_blocks_are_one_kind() -> None:
    assert num_kinds(PRESETS["llama3-8b"]) == 1
    assert num_kinds(PRESETS["deepseek-v3"]) == 2


def test_a_job_that_leaves_it_out_is_compiled_where_that_pays(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nsource = "llama-1m"\n[layout]\ndp_shard = 2\n[train]\nsteps = 20\n')
    for is_accelerator in (True, False):
        settled, choice = settle_compile(load_job(file), 2, is_accelerator=is_accelerator)
        assert choice is not None
        assert settled.job.layout.compile is choice.compiles is is_accelerator


def test_async_tp_is_refused_where_what_is_left_open_compiles_nothing(tmp_path: Path) -> None:
    keys = ("layout.dp_shard=1", "layout.tp=2", "layout.async_tp=true", "train.steps=20")
    settled, _ = settle_compile(job(tmp_path, *keys), 2, is_accelerator=True)
    assert settled.job.layout.compile is True
    with pytest.raises(ConfigError, match=r"needs compiled blocks.*since 20 steps.* set layout.compile"):
        settle_compile(job(tmp_path, *keys), 2, is_accelerator=False)
