"""`meshwright simulate`: a job's step for all of its ranks, clear errors, and every file that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.errors import ExitCode
from meshwright.spec.step.simulation_report import SimulationReport
from meshwright.spec.trace.timeline import Timeline
from repository import ROOT

TINY = str(ROOT / "examples" / "tiny.toml")
PLANTED = ROOT / "examples" / "planted_faults.py"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["simulate", *arguments]) == ExitCode.BAD_INPUT
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job's simulation writes; its step takes a second of the device's memory that is there."""
    out: Path = tmp_path_factory.mktemp("simulation")
    keys = ["layout.dp_shard=2", "train.global_batch_size=4", f"data.cache_dir={out / 'cache'}"]
    with pytest.raises(SystemExit) as ending:
        run(["simulate", TINY, *keys, "--cluster", "h100-ib400:2", "--json", "--out", str(out / "out")])
    assert ending.value.code == ExitCode.DONE
    return out / "out"


def test_everything_is_written(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {
        "simulation.json",
        "report.html",
        "timeline.npz",
        "timeline.perfetto.json.gz",
    }


def test_the_parts_sum_to_the_step_and_stand_beside_the_formulas(folder: Path) -> None:
    found = SimulationReport.from_json((folder / "simulation.json").read_text())
    outcome = found.outcome
    assert outcome is not None
    assert outcome.parts.total_s == pytest.approx(outcome.step_s)
    assert 0 < outcome.fixed_cpu_bound_s <= outcome.parts.cpu_bound_s
    assert sum(outcome.compute.values()) == pytest.approx(outcome.parts.compute_s)
    assert outcome.predicted is not None
    assert outcome.predicted_parts is not None
    assert outcome.predicted_parts.total_s == pytest.approx(outcome.predicted.step.total_s)
    assert outcome.mfu == pytest.approx(outcome.predicted.step.model_flops_at_peak_s / outcome.step_s)
    assert found.misfits == ()


@pytest.mark.long
def test_a_named_model_is_simulated_in_the_layout_that_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--model", "llama-1m", "--cluster", "h100-ib400:2", "--seq-len", "256", "--global-batch-size", "4"]
    with pytest.raises(SystemExit) as ending:
        run(["simulate", *named, "layout.tp=2", "--json"])
    assert ending.value.code == ExitCode.DONE
    found = SimulationReport.from_json(capsys.readouterr().out)
    assert found.layout is not None
    assert (found.layout.tp, found.layout.num_ranks) == (2, 2)
    assert "--model" in refusal(capsys, TINY, *named)
    assert "belong to --model" in refusal(capsys, "layout.tp=2", "--seq-len", "256")
    assert "--model needs --cluster" in refusal(capsys, "--model", "llama-1m", "--global-batch-size", "4")


def test_a_schedule_of_a_file_is_simulated_without_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = tmp_path / "mine.csv"
    schedule.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    keys = [f"layout.schedule={schedule}", "layout.pp=2", "layout.microbatch_size=2", "train.global_batch_size=4"]
    with pytest.raises(SystemExit) as ending:
        run(["simulate", TINY, *keys, f"data.cache_dir={tmp_path}", "--cluster", "h100-ib400:2", "--json"])
    assert ending.value.code == ExitCode.DONE
    outcome = SimulationReport.from_json(capsys.readouterr().out).outcome
    assert outcome is not None
    assert outcome.predicted is None
    assert outcome.parts.pipeline_bubble_s > 0


def test_what_is_held_at_the_peak_is_no_more_than_what_is_allocated(folder: Path) -> None:
    outcome = SimulationReport.from_json((folder / "simulation.json").read_text()).outcome
    assert outcome is not None
    assert len(outcome.memory) == len(outcome.ranks) == 1
    memory = outcome.memory[0]
    assert memory.num_ranks == 2
    assert sum(live.num_bytes for live in memory.largest) <= sum(memory.by_role.values()) <= memory.allocated_bytes
    assert memory.allocated_bytes <= memory.reserved_bytes
    assert memory.phase in ("forward", "backward")
    assert memory.scope.startswith("blocks.") or memory.scope in ("head", "")


def test_collectives_are_those_of_the_layout(folder: Path) -> None:
    outcome = SimulationReport.from_json((folder / "simulation.json").read_text()).outcome
    assert outcome is not None
    sharding = [use for use in outcome.collectives if use.axis == "fsdp"]
    assert sharding
    assert {use.num_ranks for use in sharding} == {2}
    assert all(0 <= use.exposed_s <= use.total_s + 1e-12 for use in outcome.collectives)
    exposed = sum(one.exposed_s for one in outcome.exposed)
    assert exposed == pytest.approx(sum(use.exposed_s for use in outcome.collectives))
    assert Timeline.load(folder / "timeline.npz").step_s == outcome.step_s


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ("no job file is named", "--build")),
        ([TINY, TINY], ("2 job files", "name one")),
        ([TINY, "--ranks", "4"], ("--ranks is for --build", "--cluster NAME:COUNT")),
        ([TINY, "--every-rank"], ("--every-rank is for --build", "leave it out")),
        (
            [TINY, "layout.dp_shard=4", "--cluster", "h100-ib400:8"],
            ("--cluster h100-ib400:8: 8 devices cannot run a layout of dp_shard=4: set ", "take 4 of them"),
        ),
        (
            [TINY, "layout.dp_replicate=6", "layout.dp_shard=-1", "train.global_batch_size=48", "--cluster", "h100:16"],
            ("--cluster h100:16: 16 devices do not divide by dp_replicate=6", "take 6 or 24 of them"),
        ),
        ([TINY, "layout.search=true", "--cluster", "h100-ib400:8"], ("layout.search", "meshwright plan")),
        ([TINY, "--cluster", "h100-ib400"], ("number of devices is missing", "h100-ib400:8")),
        (["--build", f"{PLANTED}:sound"], ("--build needs --ranks",)),
        (["--build", str(PLANTED), "--ranks", "2"], ("names no function", "FILE.py:FUNCTION")),
        ([TINY, "--build", f"{PLANTED}:sound", "--ranks", "2"], ("both say what to run",)),
        (["--build", f"{PLANTED}:sound", "--ranks", "2", "--cluster", "h100:4"], ("differ", "COUNT 2")),
    ],
)
def test_bad_input_is_refused_before_anything_is_traced(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *arguments)
    assert said.startswith("error: ")
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--slow-rank=99:2", ("--slow-rank 99:2", "less than the 2 ranks", "write 0 to 1")),
        ("--slow-rank=2:2", ("--slow-rank 2:2", "less than the 2 ranks")),
        ("--routing=zipf:-1", ("routing = 'zipf:-1'", "zipf:1.2")),
        ("--routing=missing.json", ("routing = 'missing.json'", "No such file", "balanced")),
        ("--jitter=2", ("--jitter 2", "write 0.05")),
    ],
)
@pytest.mark.parametrize("target", [(TINY,), ("--build", f"{PLANTED}:sound", "--ranks", "2")])
def test_conditions_are_refused_before_tracing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    parts: tuple[str, ...],
    target: tuple[str, ...],
) -> None:
    for name in ("trace_job.trace_job", "programs.program_ranks.trace_program"):
        monkeypatch.setattr(f"meshwright.tracer.{name}", lambda *_, **__: pytest.fail("traced"))
    said = refusal(capsys, *target, "--cluster", "h100-ib400:2", option)
    assert all(part in said for part in parts)


@pytest.mark.parametrize("jitter", ["nan", "50", "-0.1"])
def test_a_jitter_that_no_machine_has_is_refused(capsys: pytest.CaptureFixture[str], jitter: str) -> None:
    assert "write 0.05" in refusal(capsys, TINY, "--cluster", "h100-ib400:2", f"--jitter={jitter}")


@pytest.mark.parametrize("slow", ["0:0", "0:-1", "0:nan", "-1:2", "0:inf"])
def test_a_rank_is_slower_by_a_factor_above_zero(capsys: pytest.CaptureFixture[str], slow: str) -> None:
    assert "factor more than 0" in refusal(capsys, TINY, "--cluster", "h100-ib400:2", f"--slow-rank={slow}")


@pytest.mark.parametrize("option", ["--out", "--html", "--perfetto"])
def test_a_folder_that_cannot_be_written_is_refused_before_tracing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("meshwright.tracer.trace_job.trace_job", lambda *_, **__: pytest.fail("traced"))
    # A folder in which no file can be made, not by root either.
    folder = "/proc/report" if option == "--out" else "/proc"
    file = folder if option == "--out" else "/proc/file"
    assert f"cannot write to the folder {folder}" in refusal(
        capsys, TINY, "--cluster", "h100-ib400:2", f"{option}={file}"
    )


@pytest.mark.parametrize("option", ["--html", "--perfetto"])
def test_a_folder_that_does_not_exist_is_not_made_for_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.setattr("meshwright.tracer.trace_job.trace_job", lambda *_, **__: pytest.fail("traced"))
    file = tmp_path / "missing" / "page"
    said = refusal(capsys, TINY, "--cluster", "h100-ib400:2", option, str(file))
    assert f"there is no folder {file.parent}" in said
    assert not file.parent.exists()


def test_a_file_is_no_folder_for_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    said = refusal(capsys, TINY, "--cluster", "h100-ib400:2", "--out", str(file))
    assert said.startswith(f"error: --out {file} is a file")


def test_a_missing_package_is_named_before_tracing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwright.tracer.trace_job.trace_job", lambda *_, **__: pytest.fail("traced"))
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert run(["simulate", TINY, "--cluster", "h100-ib400:2", "--html", str(tmp_path / "page.html")]) != ExitCode.DONE
    assert "pip install '.[report]'" in capsys.readouterr().err


def test_a_slow_rank_is_a_rank_and_a_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert "write 3:1.5" in refusal(capsys, TINY, "--cluster", "h100-ib400:2", "--slow-rank", "three")


@pytest.mark.long
def test_a_program_that_would_hang_is_named_and_ends_with_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run(["simulate", "--build", f"{PLANTED}:ring_deadlock", "--ranks", "4", "--json"])
    assert ending.value.code == ExitCode.BAD_INPUT
    record = json.loads(capsys.readouterr().out)
    assert [problem["kind"] for problem in record["problems"]] == ["deadlock"]
    assert record["outcome"] is None
