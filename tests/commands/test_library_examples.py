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


TINY = repr(str(EXAMPLES / "tiny.toml"))
SMALL_PLAN = 'model="llama-1m", cluster="h100:4", seq_len=256, global_batch_size=8'


@pytest.mark.long
def test_a_script_without_a_main_guard_starts_processes(tmp_path: Path) -> None:
    expressions = (
        f"mw.prove({TINY}, 'tp=2', steps=1).holds",
        f"mw.plan({SMALL_PLAN}, simulate=2).pick.simulated.step_s > 0",
    )
    script = tmp_path / "script.py"
    script.write_text("\n".join(["import meshwright as mw", *(f"print({each})" for each in expressions)]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True", "True"], done.stderr


@pytest.mark.long
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    names = run_notebook(EXAMPLES / "plan_and_simulate.ipynb")
    assert names["with_tp"].layout.tp == 8
    assert names["with_tp"].step_s > names["plan"].step_s
    assert names["simulation"].fits


@pytest.mark.long
def test_a_loop_of_ones_own_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    lines = []
    for num_ranks, last_step in ((2, 10), (3, 12)):
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(num_ranks)]
        command = [*torchrun, str(EXAMPLES / "own_loop.py"), "mine", str(last_step)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        lines += done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [str(step) for step in range(1, 13)]
    assert lines[-1].endswith("samples 384")
