"""The examples of the Python API run: a script and a notebook."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from notebook import run_notebook
from repository import ROOT

EXAMPLES = ROOT / "examples"


def test_the_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "use_as_a_library.py"))["main"](tmp_path)
    assert "Step time against memory" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    text = capsys.readouterr().out
    for line in ("<Plan llama3-8b on 64 x h100-sxm: ", "where the step goes", "<Simulation llama-1m on 4 x h100-sxm: "):
        assert line in text


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    names = run_notebook(EXAMPLES / "plan_and_simulate.ipynb")
    assert names["with_tp"].layout.tp == 8
    assert names["with_tp"].step_s > names["plan"].step_s
    assert names["simulation"].fits
