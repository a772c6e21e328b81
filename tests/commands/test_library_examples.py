"""The examples of the Python API run: a script and a notebook."""

from __future__ import annotations

import runpy
import subprocess
import sys
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


def test_a_script_without_a_main_guard_proves(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import meshwright as mw\nprint(mw.prove({str(EXAMPLES / 'tiny.toml')!r}, 'tp=2', steps=1).holds)"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True"], done.stderr


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    names = run_notebook(EXAMPLES / "plan_and_simulate.ipynb")
    assert names["with_tp"].layout.tp == 8
    assert names["with_tp"].step_s > names["plan"].step_s
    assert names["simulation"].fits
