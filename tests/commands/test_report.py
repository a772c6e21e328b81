"""`meshwright report`: a run's steps next to what was predicted of its layout."""

import gzip
import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.app.reports.report import short_report
from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.run import Attempt, Manifest, Run
from meshwright.units import format_duration

JOB = Job.from_dict(
    {
        "model": {"source": "llama3-8b"},
        "cluster": {"name": "dgx-h100"},
        "precision": {"compute": "bfloat16"},
        "train": {"seq_len": 8192},
    }
)


def write_run(folder: Path, step_ms: float) -> Path:
    folder.mkdir()
    start = Attempt(
        started_at="2026-01-01T00:00:00+00:00",
        start_step=0,
        pids=[1],
        hosts=["h"],
        layout=Layout(dp_shard=8, compile=True),
        versions={},
    )
    manifest = Manifest(job=JOB, seed=0, num_parameters=1, attempts=[start])
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    rows = [{"step": step, "step_ms": step_ms, "attempt": 1} for step in range(1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_the_waterfall_ends_at_the_expected_step_beside_the_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    predicted_s = sum(record["predicted"]["estimate"]["step"].values())
    assert record["measured_step_s"] == pytest.approx(1.0)
    assert 0.2 < predicted_s < 2
    assert sum(record["parts"]["predicted"].values()) == pytest.approx(predicted_s)
    assert "measured" not in record["parts"]
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert "dp_shard=8" in page
    assert "the median of steps 4 to 9" in page
    assert f"{100 * (predicted_s - 1):.1f} % of the measured step" in page
    assert "MFU" in page
    assert "no step was profiled" in page
    assert "run.profile_start" in page
    assert "Largest potential speedup" in page or "No change of one" in page
    waterfall = record["waterfall"]
    assert (waterfall["source"], waterfall["measured"]) == ("timers", {"compute_s": 1.0})
    assert sum(waterfall["predicted"].values()) == pytest.approx(predicted_s)


def test_the_error_of_the_prediction_is_one_figure_on_the_page_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "slow", 4000.0)
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    estimate, found = record["predicted"]["estimate"], record["waterfall"]
    predicted_s = sum(estimate["step"].values())
    # The step was measured further away than half of the interval reaches.
    assert 4.0 - predicted_s > estimate["relative_error"] * predicted_s
    assert found["changes"][0]["error_s"] == pytest.approx(4.0 - predicted_s)
    assert run(["report", str(folder)]) == ExitCode.DONE
    said = f"save more than the error of the prediction (±{format_duration(found['changes'][0]['error_s'])})"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_profiled_step_stands_beside_the_expected_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    (folder / "timelines").mkdir()
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 0, "dur": 1.2e6, "tid": 1, "pid": 1}
    operator = mark | {"cat": "cpu_op", "name": "aten::mm", "ts": 1e5, "dur": 9e5}
    with gzip.open(folder / "timelines" / "step-4-rank-0.json.gz", "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": [mark, operator]}, stream)
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    profiled, causes = record["parts"]["measured"], record["waterfall"]["measured"]
    assert (profiled["compute_s"], profiled["cpu_bound_s"]) == pytest.approx((0.9, 0.3))
    assert causes["model_flops_at_peak_s"] + causes["gemm_inefficiency_s"] == pytest.approx(0.9)
    assert causes["model_flops_at_peak_s"] > 0
    assert run(["report", str(folder), "--html", str(tmp_path / "run.html")]) == ExitCode.DONE
    assert "the causes above are of rank 0 alone" in (tmp_path / "run.html").read_text(encoding="utf-8")
    page = " ".join(capsys.readouterr().out.split())
    assert "profiler, and noise -200 ms" in page
    assert "step, median 1 s" in page
    assert "Measured: step 4, of rank 0, the critical one" in page


def test_a_machine_without_calibration_has_no_percentage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    manifest = Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))
    (attempt,) = manifest.attempts
    on_cpu = manifest.replace(job=Job(), attempts=[attempt.replace(layout=Layout())])
    (folder / "manifest.json").write_text(on_cpu.to_json(), encoding="utf-8")
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert "This machine is not calibrated" in page
    assert "`meshwright calibrate` measures it" in page
    assert "differ by" not in page
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["rates_of"].startswith("one of 2 ranks")
    assert repr(mw.report(folder)).endswith("predicted (of an example machine: this one is not calibrated)>")


def test_a_run_of_an_own_model_has_no_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    manifest = Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))
    job = JOB.replace(model=JOB.model.replace(source="mine:Model"))
    (folder / "manifest.json").write_text(manifest.replace(job=job).to_json(), encoding="utf-8")
    page = tmp_path / "page.html"
    assert run(["report", str(folder), "--html", str(page)]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "the median of steps 4 to 9" in shown
    assert "No prediction: the formulas do not know the operations of mine:Model" in shown
    assert "No prediction" in page.read_text(encoding="utf-8")
    report = mw.report(folder)
    assert (report.measured_s, report.predicted_s, json.loads(report.to_json())["predicted"]) == (1.0, None, None)
    assert repr(report).endswith("9 steps, 1 s/step measured>")
    assert set(report.plots) == {"step_s"}


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "none")]) == ExitCode.BAD_INPUT
    assert "is no run folder" in capsys.readouterr().err


def test_a_run_that_was_resumed_in_another_layout_names_the_one_that_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    manifest = Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))
    newest = manifest.attempts[0].replace(start_step=9, layout=Layout(tp=2, dp_shard=4, compile=True))
    resumed = manifest.replace(attempts=[*manifest.attempts, newest])
    assert short_report(Run(folder))
    (folder / "manifest.json").write_text(resumed.to_json(), encoding="utf-8")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as rows:
        rows.writelines(json.dumps({"step": step, "step_ms": 500.0, "attempt": 2}) + "\n" for step in (10, 11))
    assert short_report(Run(folder)) == []
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert "Timed: attempt 1 of 2. The newest attempt trains in another layout, dp_shard=4,tp=2,compile=true" in page
    mw.report(folder).to_html(tmp_path / "run.html")
    assert "Timed: attempt 1 of 2." in (tmp_path / "run.html").read_text(encoding="utf-8")
    record = json.loads(mw.report(folder).to_json())
    assert (record["timed_attempt"], record["untimed_layout"]["tp"]) == (1, 2)


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        ({"steps": 9}, "run.profile_start=8 two of a run"),
        ({"steps": 1}, "run.profile_start=1 the one of a run"),
        ({"steps": 60, "stop_after": 11}, "run.profile_start=10 two of a run"),
    ],
)
def test_the_step_that_is_advised_to_be_profiled_is_one_of_the_run(
    train: dict[str, int], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    manifest = Manifest.from_json((folder / "manifest.json").read_text(encoding="utf-8"))
    job = JOB.replace(train=JOB.train.replace(**train))
    (folder / "manifest.json").write_text(manifest.replace(job=job).to_json(), encoding="utf-8")
    assert run(["report", str(folder)]) == ExitCode.DONE
    assert advice in " ".join(capsys.readouterr().out.split())


def test_skipped_updates_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"step": 10, "step_ms": 1000.0, "attempt": 1, "loss": null, "decision": "skip"}\n')
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert "1 of 10 updates was skipped: step 10; goodput does not count it" in page
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    assert (record["num_steps"], record["skipped_steps"]) == (10, [10])


def test_updates_that_were_skipped_before_a_rollback_are_counted_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", 1000.0)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as rows:
        for step, decision in ((10, "skip"), (11, "roll back"), (10, "skip")):
            rows.write(f'{{"step": {step}, "step_ms": 1000.0, "attempt": 1, "loss": 1.0, "decision": "{decision}"}}\n')
    assert run(["report", str(folder)]) == ExitCode.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert "1 of 10 updates was skipped: step 10;" in page
    assert "2 more updates were skipped in steps that a rollback or a restart cut off, 3 in all" in page
    assert run(["report", str(folder), "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    assert (record["num_steps"], record["skipped_steps"], record["num_skips_cut_off"]) == (10, [10], 2)
