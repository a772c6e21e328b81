"""Without a job file, errors and reasons name the options that say what keys of a job would."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.app.named_options import as_options
from meshwright.cli.main import run
from meshwright.errors import ExitCode, MeshwrightError

WORDS = ["--model", "llama3-8b", "--cluster", "h100:8", "--seq-len", "4097", "--global-batch-size", "64"]
RULE = "seq-len 4097 does not divide by 2, as it must for layout.tp = 2 (which splits the sequence between matmuls)"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_an_error_names_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, *WORDS, "layout.tp=2"]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert f"--{RULE}: set --seq-len to 4096 or 4098" in said
    assert "train." not in said


def test_python_is_told_its_own_words() -> None:
    with pytest.raises(MeshwrightError, match=r"seq_len=4097 does not divide by 2.* set seq_len to 4096 or 4098"):
        mw.plan("layout.tp=2", model="llama3-8b", cluster="h100:8", seq_len=4097, global_batch_size=64)


def test_reasons_on_the_page_name_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    plan = mw.plan(model="llama3-8b", cluster="h100:8", seq_len=4097, global_batch_size=64)
    [reason] = [one.reason for one in plan.rejections if one.change == "tp=2"]
    assert reason.startswith(f"--{RULE}")
    assert "train.seq_len" not in plan.table()


def test_a_key_that_was_given_keeps_its_name() -> None:
    text = 'train.seq_len = 5 is wrong: set train.seq_len to 4, or model.source = "x" to y; train.seq_lens'
    assert as_options(text) == "--seq-len 5 is wrong: set --seq-len to 4, or --model x to y; train.seq_lens"
    assert as_options(text, ["train.seq_len=5"]).startswith("train.seq_len = 5 is wrong: set train.seq_len to 4")
