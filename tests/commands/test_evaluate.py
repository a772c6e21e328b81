"""`meshwright evaluate` and [evaluation], as a user calls them."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import meshwright as mw
from hf_models import architecture, write_run
from meshwright.cli.main import run
from repository import ROOT

CHOICES = str(ROOT / "examples" / "choices.jsonl")


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A run folder."""
    write_run(tmp_path / "run", architecture())
    return str(tmp_path / "run")


def test_evaluate_prints_what_it_measured(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", trained, "--tasks", CHOICES, "--limit", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["origin"].endswith("step-3")
    assert [one["measure"] for one in found["measures"]] == ["acc", "acc_norm", "acc_bytes"]
    assert {one["num_questions"] for one in found["measures"]} == {20}
    assert run(["evaluate", trained, "--tasks", f"{CHOICES}, {CHOICES}", "--batch-size", "3"]) == 0
    shown = capsys.readouterr().out
    assert f"reading {found['max_tokens']} tokens at most" in shown
    assert "acc_norm" in shown
    assert repr(mw.evaluate(trained, [CHOICES])).startswith(f"<Evaluation of {trained}/checkpoints/step-3 on ")


def test_evaluate_names_what_is_wrong(trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"query": "a"}\n')
    assert run(["evaluate", trained, "--tasks", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl:1: choices = null must be a list of two or more texts" in capsys.readouterr().err
    assert run(["evaluate", trained, "--tasks", CHOICES, "--num-fewshot", "2"]) == 2
    assert "--num-fewshot is of lm-evaluation-harness" in capsys.readouterr().err
    assert run(["evaluate", trained, "--tasks", " , "]) == 2
    assert "there is no task" in capsys.readouterr().err
    assert run(["evaluate", trained, "--tasks", CHOICES, "--step", "9"]) == 2
    assert "no checkpoint of step 9" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_evaluate_names_the_extra(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", trained, "--tasks", "hellaswag"]) == 2
    assert "needs the package lm_eval" in capsys.readouterr().err


def test_check_reads_the_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    (tmp_path / "choices.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "answer": 1}\n')
    (tmp_path / "a.txt").write_text("words " * 2000)
    job.write_text('[data]\nsource = "a.txt"\n[evaluation]\nsource = "choices.jsonl"\ninterval = 5\n')
    assert run(["check", str(job), "train.seq_len=64"]) == 0
    capsys.readouterr()
    (tmp_path / "choices.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "answer": 2}\n')
    assert run(["check", str(job), "train.seq_len=64"]) == 2
    assert "choices.jsonl:1: answer = 2 must be the place of the right choice, 0 to 1" in capsys.readouterr().err
    assert run(["check", str(job), "train.seq_len=64", "evaluation.source=none"]) == 2
    assert "evaluation.interval = 5 does nothing without evaluation.source" in capsys.readouterr().err
