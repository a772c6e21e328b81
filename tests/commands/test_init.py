"""`meshwright init`: a commented job file that check accepts, and that never replaces another."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.config.keys import SCHEMA_FILE
from meshwright.config.load import load_job
from meshwright.spec.model.hf.hf_config import architecture_to_hf
from meshwright.spec.model.presets import PRESETS


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", PRESETS)
def test_the_file_is_sound_for_every_preset(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert run(["init", model]) == 0
    assert capsys.readouterr().out == (
        "wrote job.toml\nnext: meshwright check job.toml, then meshwright train job.toml\n"
    )
    assert load_job("job.toml").job.model.source == model


def test_golden_head(capsys: pytest.CaptureFixture[str]) -> None:
    Path("jobs").mkdir()
    assert run(["init", "llama3-8b", "--out", "jobs/first.toml"]) == 0
    lines = Path("jobs/first.toml").read_text().splitlines()
    assert lines[:2] == [
        "# A job for llama3-8b, written by `meshwright init`: places to start from, not tuned values.",
        "# Set [data] to your own text and tokenizer. `meshwright check jobs/first.toml` lists what is wrong with it.",
    ]
    assert 'activation_checkpoint = "selective"' in lines
    assert "dp_shard = -1" in lines


def test_the_schema_is_written_next_to_the_job_when_asked() -> None:
    Path("jobs").mkdir()
    assert run(["init", "llama-1m", "--out", "jobs/first.toml", "--schema"]) == 0
    assert run(["init", "llama-1m", "--out", "jobs/second.toml", "--schema"]) == 0
    assert Path("jobs/second.toml").read_text().startswith("#:schema job.schema.json\n# A job for llama-1m")
    assert Path("jobs/job.schema.json").read_text() == SCHEMA_FILE.read_text()
    Path("jobs/job.schema.json").write_text("mine")
    assert run(["init", "llama-1m", "--out", "jobs/third.toml", "--schema"]) == 2


def test_a_config_file_is_named_relative_to_the_job() -> None:
    Path("jobs").mkdir()
    config = architecture_to_hf(PRESETS["llama-1m"])
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(["init", "config.json", "--out", "jobs/first.toml"]) == 0
    assert 'source = "../config.json"' in Path("jobs/first.toml").read_text().splitlines()
    assert load_job("jobs/first.toml").job.model.source == "jobs/../config.json"


def test_a_small_model_trains_in_float32(tmp_path: Path) -> None:
    assert run(["init", "llama-1m"]) == 0
    job = load_job("job.toml").job
    assert job.precision.compute == "float32"
    assert job.train.seq_len == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8c"], "did you mean llama3-8b?"),
        (["mine:Model"], "error: 'mine:Model' is a class of your own, whose size is not known before it runs: name a "
         "preset (`meshwright list models`) to begin with, then set model.source = 'mine:Model' in the file\n"),
        (["llama-1m", "--out", "taken.toml"],
         "error: taken.toml exists and is not overwritten: name another file with --out, or remove it\n"),
        (["llama-1m", "--out", "nowhere/job.toml"],
         "error: nowhere/job.toml cannot be written (No such file or directory): name a file in a folder that exists "
         "and is yours with --out\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_written(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    Path("taken.toml").write_text("mine")
    assert run(["init", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert Path("taken.toml").read_text() == "mine"
    assert not Path("job.toml").exists()
