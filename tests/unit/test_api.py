"""`import meshwright as mw`: every command as a function."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.app.plan import PlanResult
from meshwright.app.prove import ProofResult
from meshwright.app.reports.diagnose import DiagnosisResult
from meshwright.app.results.checkpoint_results import VerificationResult
from meshwright.app.results.result import PlottedResult, Result, viewed
from meshwright.app.results.run_result import TrainedRun
from meshwright.app.results.simulation_result import Simulation, TimelineResult
from meshwright.cli.main import run
from meshwright.errors import ConfigError, ExitCode, InfeasibleLayout, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.checkpoint_findings import CheckpointVerification
from meshwright.spec.run.layout_plan import Plan
from meshwright.spec.run.proof import Change, Difference, LayoutProof
from meshwright.spec.trace.traces import Traces
from meshwright.units import GiB
from questions import SMALL_PLAN
from simulated_steps import simulated_step
from simulation_reports import simulation_report_of
from written_runs import STEPS, write_run
from written_steps import WrittenStep

ROWS = [
    row | {"loss": 4.0 - row["step"] / 100, "grad_norm": 1.0, "learning_rate": 1e-3, "memory_bytes": 2**30}
    for row in STEPS
]
TRACES = Traces(2, {0: WrittenStep().trace()}, np.zeros(2, np.int64))


@pytest.fixture(scope="module")
def plan() -> PlanResult:
    return mw.plan(model="llama3-8b", cluster="h100-ib400:8", seq_len=2048, global_batch_size=16)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    timeline = viewed(TimelineResult, simulated_step())
    return Simulation(simulation_report_of(timeline), timeline, TRACES)


@pytest.fixture(scope="module")
def results(
    plan: PlanResult, simulation: Simulation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Result]]:
    """Return what makes a result of each kind; each is made without torch.distributed."""
    folder = tmp_path_factory.mktemp("runs")
    a, b = write_run(folder / "a", ROWS), write_run(folder / "b", ROWS)
    proof = ProofResult(
        job=Job(),
        changes=(Change(key="dim", original="128", proven="32"),),
        num_steps=3,
        num_parameters=1000,
        precision="float32",
        layouts=(
            LayoutProof(
                layout=Layout(tp=2),
                differences=(Difference(kind="loss", name="", step=1, relative=1e-7, bar=1e-6),),
                took_s=1.0,
            ),
        ),
        date="2026-01-01",
        versions={},
        took_s=2.0,
    )
    diagnosis = DiagnosisResult(
        folder="runs/x", verdict="died", culprits=[1], headline="rank 1 is gone", evidence=[], advice="Go.", ranks=[]
    )
    assert simulation.timeline is not None
    return {
        "plan": lambda: plan,
        "simulation": lambda: simulation,
        "timeline": lambda: simulation.timeline,
        "run": lambda: TrainedRun(a, ExitCode.DONE),
        "report": lambda: mw.report(a),
        "steps": lambda: mw.compare(simulation.timeline, simulation.timeline),
        "runs": lambda: mw.compare(a, b),
        "proof": lambda: proof,
        "diagnosis": lambda: diagnosis,
    }


KINDS = {
    "plan": "<Plan llama3-8b on 8 x h100-sxm: dp_shard=4,tp=2,",
    "simulation": "<Simulation llama3-8b on 8 x h100-sxm: pp=4,dp_shard=2, ",
    "timeline": "<Timeline ",
    "run": "<Run ",
    "report": "<Report ",
    "steps": "<Comparison job.toml, job.toml: ",
    "runs": "<Comparison ",
    "proof": "<Proof llama-1m: 1 layout, all hold, 3 steps in float32>",
    "diagnosis": "<Diagnosis runs/x: died: rank 1 is gone>",
}


def test_the_import_takes_no_torch_and_nothing_heavy() -> None:
    code = "import sys, meshwright; print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_each_name_is_a_documented_function() -> None:
    for name in mw.__all__:
        assert getattr(mw, name).__doc__
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mw.trian  # type: ignore[attr-defined]


def test_a_loaded_job_is_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\nsource = "llama-15m"\n')
    job = mw.load_job(tmp_path / "job.toml", "train.steps=3")
    assert repr(job) == f"<Job {tmp_path}/job.toml train.steps=3: llama-15m>"
    assert repr(mw.load_job(job, "train.seed=1")) == f"<Job {tmp_path}/job.toml train.steps=3 train.seed=1: llama-15m>"


@pytest.mark.slow
def test_a_model_and_a_job_are_planned_alike(tmp_path: Path) -> None:
    named = mw.plan(model="llama-15m", cluster="h100-ib400:16", seq_len=512, global_batch_size=64, simulate=0)
    file = tmp_path / "job.toml"
    file.write_text(
        '[model]\nsource = "llama-15m"\n[train]\nseq_len = 512\nglobal_batch_size = 64\n[precision]\n'
        'compute = "bfloat16"\n[cluster]\nname = "h100-ib400"\nnum_devices = 16\n'
    )
    of_job = mw.plan(mw.load_job(file), simulate=0)
    assert of_job.pick.layout == named.pick.layout
    assert of_job.pick.estimate.step == named.pick.estimate.step
    kept = mw.plan(file, "layout.tp=2", simulate=0)
    assert kept.pick.layout.tp == 2 != named.pick.layout.tp


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
    assert found.predicted_s == found.predicted.estimate.step.total_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_one_line_a_table_and_html(kind: str, results: dict[str, Callable[[], Result]]) -> None:
    found = results[kind]()
    assert repr(found).startswith(KINDS[kind])
    assert repr(found).endswith(">")
    assert "\n" not in repr(found)
    assert str(found) == found.table()
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert unescape(re.sub("<[^>]+>", "", html)).rstrip() == found.table(width=max(120, found._piped_width())).rstrip()
    assert "\x1b" not in found.table() + html


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("kind", KINDS)
def test_no_line_of_a_result_is_wider_than_the_terminal_and_no_word_is_broken(
    kind: str, width: int, results: dict[str, Callable[[], Result]]
) -> None:
    found = results[kind]()
    text = found.table(width=width)
    assert max(map(len, text.splitlines())) <= width
    # A label above a column is followed by a colon where the column has moved below its row.
    whole = {word.rstrip(":,") for word in found.table(width=400).split()}
    # A folder of tmp_path is longer than a line.
    broken = [word for word in text.split() if word.rstrip(":,") not in whole and "/" not in word]
    assert not [word for word in broken if not set(word) & set("█▏▎▍▌▋▊▉")]


@pytest.mark.parametrize("kind", KINDS)
def test_each_plot_is_drawn(kind: str, results: dict[str, Callable[[], Result]]) -> None:
    found = results[kind]()
    if not isinstance(found, PlottedResult):
        assert kind in ("runs", "proof", "diagnosis")
        return
    for name in found.plots:
        assert len(found.plot(name).data) > 0
    assert found.plot().to_json() == found.plot(found.plots[0]).to_json()
    with pytest.raises(ConfigError, match=f"plot\\('lost'\\): must be one of {found.plots[0]}"):
        found.plot("lost")


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_frame_has_rows(kind: str, results: dict[str, Callable[[], Result]]) -> None:
    pytest.importorskip("pandas")
    found = results[kind]()
    assert len(found.to_pandas()) > 0 or kind == "diagnosis"


def test_results_of_commands_have_the_json_that_they_print(
    results: dict[str, Callable[[], Result]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = json.loads(results["run"]().to_json())  # type: ignore[attr-defined]
    assert list(found) == ["exit_code", "run_dir", "results"]
    job = tmp_path / "job.toml"
    job.write_text("[train]\nsteps = 3\n", encoding="utf-8")
    assert run(["check", str(job), "--json"]) == ExitCode.DONE
    assert json.loads(mw.check(job).to_json()) == json.loads(capsys.readouterr().out)


def test_an_intact_checkpoint_has_a_row() -> None:
    one = CheckpointVerification(
        folder="runs/x/checkpoints/step-3",
        step=3,
        num_bytes=8,
        num_tensors=1,
        num_shards=1,
        num_ranks=1,
        duration_s=0.1,
        damages=[],
    )
    [row] = VerificationResult(checkpoints=[one])._rows()
    assert (row["step"], row["is_intact"], row["num_bytes_read"], row["tensor"]) == (3, True, 8, None)


def test_a_data_frame_without_pandas_says_what_to_install(plan: PlanResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match=r"a data frame needs the package pandas.*pip install '\.\[pandas\]'"):
        plan.to_pandas()


def test_the_frame_of_a_plan_has_each_layout_once(plan: PlanResult) -> None:
    rows: list[dict[str, Any]] = list(plan._rows())
    assert rows[0]["role"] == "pick"
    assert rows[0]["step_s"] == plan.step_s
    assert rows[0]["free_bytes"] == plan.pick.free_bytes
    layouts = [row["layout"] for row in rows]
    assert len(set(layouts)) == len(layouts)
    for one in (*plan.pareto_front, *plan.runners_up):
        assert layout_text(one.layout.effective) in layouts


def test_the_frame_of_a_timeline_has_names_for_positions(simulation: Simulation) -> None:
    timeline = simulation.timeline
    assert timeline is not None
    columns = timeline._rows()
    assert set(columns["kind"]) <= {"compute", "communication", "wait", "host", "data"}
    assert set(columns["name"]) <= {*timeline.names, ""}
    assert all(text == "" for text, at in zip(columns["axis"], timeline.spans.axis, strict=True) if at < 0)
    assert len(columns["start_s"]) == len(timeline.spans)


@pytest.mark.slow
def test_the_command_prints_the_table(
    plan: PlanResult, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(SMALL_PLAN) == ExitCode.DONE
    assert capsys.readouterr().out == plan.table() + "\n"
    assert plan.table(width=200) != plan.table()


def test_a_result_has_the_fields_and_the_json_of_its_data_type(plan: PlanResult) -> None:
    assert isinstance(plan, Plan)
    assert Plan.from_json(plan.to_json()).to_dict() == plan.to_dict()
    assert plan.layout == plan.pick.layout
    assert plan.mfu == plan.pick.estimate.mfu


def test_a_simulation_says_what_is_wrong(simulation: Simulation) -> None:
    stuck = Simulation(simulation_report_of(None), None, TRACES)
    assert repr(stuck).endswith("deadlocks or fails: 1 problem>")
    assert not stuck.fits
    assert stuck.plots == ()
    with pytest.raises(ConfigError, match="nothing to plot"):
        stuck.plot()
    full = Simulation(simulation_report_of(simulation.timeline, usable_bytes=20 * GiB), simulation.timeline, TRACES)
    assert repr(full).endswith("of 20 GiB, out of memory>")
    assert not full.fits
    assert simulation.fits


def test_a_run_that_did_not_train_has_no_curves(tmp_path: Path) -> None:
    lost = TrainedRun(tmp_path, ExitCode.BAD_INPUT)
    assert repr(lost) == f"<Run {tmp_path}: exit code 2 (bad input), no finished step>"
    assert lost.plots == ()


def test_overrides_go_with_a_named_model() -> None:
    kept = mw.plan("layout.tp=8", model="llama3-8b", cluster="h100-ib400:8", seq_len=2048, global_batch_size=16)
    assert kept.layout.tp == 8
